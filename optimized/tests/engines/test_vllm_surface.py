"""Our classes fit every recorded release of vLLM, which need not be installed: sources are read.

The surfaces are written by ``record_vllm.py``. Where vLLM is installed, ``test_vllm_installed.py``
holds the classes themselves, and the surface of that release, against it.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from record_vllm import SURFACES
from recording import assigned, fields, methods
from surface import Surface, accepts, bases, calls_of_super

import paged_mla_optimized.engines.vllm as room
from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.vllm.registration import BACKEND, PREFILL_BACKEND
from paged_mla_optimized.engines.vllm.versions import RECORDED

SOURCES = {path.stem: ast.parse(path.read_text()) for path in Path(room.__path__[0]).glob("*.py")}
OURS = {
    node.name: node
    for stem in ("backend", "builder", "impl", "prefill")
    for node in SOURCES[stem].body
    if isinstance(node, ast.ClassDef)
}
CALLS = {  # what vLLM calls, by the class of ours that it calls
    "PagedMlaBackend": (
        "get_kv_cache_stride_order",
        "get_supported_head_sizes",
        "get_supported_kernel_block_sizes",
        "supports_batch_invariance",
        "supports_combination",
        "supports_compute_capability",
    ),
    "PagedMlaMetadataBuilder": ("_build_decode", "builder_cls"),
    "PagedMlaImpl": ("forward_mqa", "impl_cls"),
    "PagedMlaPrefillBackend": (
        "prefill_backend_cls",
        "prepare_metadata",
        "run_prefill_context_chunk",
        "run_prefill_new_tokens",
        "supports_compute_capability",
    ),
}
READ = {  # attributes of vLLM's objects, by what the objects are
    "MLAAttention": ("scale", "kv_cache_dtype", "kv_b_proj"),
    "MLACommonDecodeMetadata": ("block_table", "seq_lens", "dcp_tot_seq_lens"),
    "MLACommonPrefillMetadata": ("query_start_loc", "chunked_context"),
    "MLACommonMetadata": ("decode",),
    "MLADims": ("kv_lora_rank", "qk_rope_head_dim"),
    "MLAPrefillBackend": ("_prefill_metadata", "vllm_config"),
}
CHUNKS = {  # the same of a chunk of context, by how a call names it
    "chunk_idx": ("ChunkedContextMetadata", ("cu_seq_lens",)),
    "chunk": ("ContextChunk", ("index", "query_start_loc", "cu_seq_lens")),
}


@pytest.fixture(params=RECORDED, name="surface")
def _surface(request):
    return Surface(SURFACES / f"{request.param}.json")


@pytest.mark.parametrize(("owner", "called"), [(o, c) for o, cs in CALLS.items() for c in cs])
def test_calls_of_the_engine_fit(surface, owner, called):
    ours = methods(OURS[owner])["__init__" if called.endswith("_cls") else called]
    if called == "get_kv_cache_stride_order" and called not in surface.calls:
        assert "supported_kv_cache_layouts" in surface.all_of("AttentionBackend", "methods")
        return  # what took its place means any layout where it is not overridden
    assert surface.calls[called]
    for call in surface.calls[called]:
        accepts(ours, call)


def test_a_call_that_does_not_fit_is_seen():
    with pytest.raises(TypeError, match="unexpected"):
        accepts("q, k", "q=_, k=_, chunk=_")


def _handed_on(surface: Surface, owner: str, method: str, call: str) -> str:
    """Return a call of a base class, with what ``**`` hands on of vLLM's own call."""
    maker = {"PagedMlaImpl": "impl_cls", "PagedMlaPrefillBackend": "prefill_backend_cls"}
    if method != "__init__" or owner not in maker:
        return call
    named = surface.calls[maker[owner]][0].split(", ")[call.count("0") :]
    return ", ".join(filter(None, [call, *named]))


@pytest.mark.parametrize("owner", OURS)
def test_calls_of_base_classes_fit(surface, owner):
    base = bases(OURS[owner])[0]
    assert base in surface.classes
    for method, call in calls_of_super(OURS[owner]):
        theirs = surface.method(base, method)
        assert theirs is not None
        accepts(theirs, _handed_on(surface, owner, method, call))


@pytest.mark.parametrize("stem", SOURCES)
def test_imported_names_exist(surface, stem):
    for node in ast.walk(SOURCES[stem]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
            module = surface.modules[node.module]
            known = {*module["classes"], *module["functions"]}
            assert {alias.name for alias in node.names} <= known


def test_environment_variables_exist(surface):
    read = {
        one.attr
        for source in SOURCES.values()
        for one in ast.walk(source)
        if isinstance(one, ast.Attribute) and ast.unparse(one.value) == "envs"
    }
    assert read == set(surface.names["vllm.envs"].split(", "))


@pytest.mark.parametrize("owner", OURS)
def test_attributes_of_self_exist(surface, owner):
    node, [base] = OURS[owner], bases(OURS[owner])
    read = {
        one.attr
        for one in ast.walk(node)
        if isinstance(one, ast.Attribute)
        and isinstance(one.ctx, ast.Load)
        and ast.unparse(one.value) == "self"
    }
    own = {*methods(node), *fields(node), *assigned(node)}
    theirs: set[str] = set()
    for what in ("methods", "fields", "attributes"):
        theirs |= surface.all_of(base, what)
    assert read - own - theirs == set()


@pytest.mark.parametrize("name", READ)
def test_attributes_of_the_engines_objects_exist(surface, name):
    known = surface.all_of(name, "fields") | surface.all_of(name, "attributes")
    assert set(READ[name]) <= known


def test_attributes_of_a_chunk_exist(surface):
    [call] = surface.calls["run_prefill_context_chunk"]
    name, read = CHUNKS[call.split("=")[0]]
    inner = surface.classes["MLACommonPrefillMetadata"]["classes"]
    assert set(read) <= set(inner[name]["fields"].split(", "))


def test_overridden_members_are_used_by_the_engine(surface):
    """A method that vLLM has renamed would never be called."""
    gone = {"get_kv_cache_stride_order", "supports_dcp"}  # each of one release
    for name, node in OURS.items():
        [base] = bases(node)
        for own in {*methods(node), *fields(node)} - gone - {"step", "_config"}:
            known = surface.all_of(base, "methods") | surface.all_of(base, "fields")
            assert own in known, f"{name}.{own}"


def test_graphs_and_drafts_are_levels_that_exist(surface):
    levels = surface.all_of("AttentionCGSupport", "fields")
    assert {"UNIFORM_BATCH"} <= levels
    assert {"VARLEN"} <= surface.all_of("QueryLenSupport", "fields")
    assert {"CUSTOM"} <= surface.all_of("AttentionBackendEnum", "fields")
    assert {"CUSTOM"} <= surface.all_of("MLAPrefillBackendEnum", "fields")


def test_registration_fits(surface):
    for module in surface.modules.values():
        for name, parameters in module["functions"].items():
            if name.startswith("register_"):
                accepts(parameters, "0, 0")
    for enum in ("AttentionBackendEnum", "MLAPrefillBackendEnum"):
        known = surface.all_of(enum, "methods")
        assert {"is_overridden", "get_path"} <= known
        assert ("register" in known) == serves(surface.version, (0, 32))  # names of plugins


def test_the_entry_point_is_declared():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    declared = 'paged_mla = "paged_mla_optimized.engines.vllm.registration:register"'
    assert f'[project.entry-points."vllm.general_plugins"]\n{declared}\n' in text


def test_paths_that_are_registered_name_classes() -> None:
    for path in (BACKEND, PREFILL_BACKEND):
        module, name = path.rsplit(".", 1)
        stem: Any = module.rsplit(".", 1)[1]
        assert name in {n.name for n in SOURCES[stem].body if isinstance(n, ast.ClassDef)}
