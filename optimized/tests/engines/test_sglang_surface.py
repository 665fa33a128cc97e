"""Our classes fit every recorded release of SGLang, which need not be installed: sources are read.

The surfaces are written by ``record_sglang.py``. Where SGLang is installed,
``test_sglang_installed.py`` holds the classes themselves, and the surface of that release, against
it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from record_sglang import SURFACES
from recording import assigned, fields, methods, parameters
from surface import Surface, accepts, bases, calls_of_super

import paged_mla_optimized.engines.sglang as room
from paged_mla_optimized.engines.sglang.registration import FACTORY, GROUP, NAME
from paged_mla_optimized.engines.sglang.versions import RECORDED

SOURCES = {path.stem: ast.parse(path.read_text()) for path in Path(room.__path__[0]).glob("*.py")}
OURS = {
    node.name: node
    for stem in ("backend", "drafts")
    for node in SOURCES[stem].body
    if isinstance(node, ast.ClassDef)
}
METADATA = (
    "init_cuda_graph_state",
    "init_forward_metadata",
    "init_forward_metadata_in_graph",
    "init_forward_metadata_out_graph",
)
CALLS = {  # what SGLang calls, by the class of ours that it calls
    "PagedMlaBackend": (
        "forward_decode",
        "forward_extend",
        "get_cuda_graph_seq_len_fill_value",
        "init_cuda_graph_state",
        "init_forward_metadata_out_graph",
    ),
    "PagedMlaDraftBackend": METADATA,
}
READ = {  # attributes of SGLang's objects, by what the objects are
    "DraftBackendFactory": ("draft_model_runner", "speculative_num_steps", "topk"),
    "EagleVerifyInput": ("custom_mask", "draft_token_num"),
    "ForwardBatch": (
        "attn_attend_prefix_cache",
        "batch_size",
        "extend_seq_lens",
        "extend_seq_lens_cpu",
        "forward_mode",
        "mha_one_shot",
        "mha_return_lse",
        "out_cache_loc",
        "positions",
        "prefix_chunk_cu_seq_lens",
        "prefix_chunk_idx",
        "req_pool_indices",
        "seq_lens",
        "spec_info",
    ),
    "NgramVerifyInput": ("custom_mask", "draft_token_num"),
    "RadixAttention": (
        "attn_type",
        "k_scale",
        "k_scale_float",
        "layer_id",
        "logit_cap",
        "qk_head_dim",
        "scaling",
        "sliding_window_size",
        "tp_q_head_num",
        "v_head_dim",
    ),
    "ReqToTokenPool": ("req_to_token", "size"),
    "MLATokenToKVPool": ("use_dsa",),
}
RUNNER = {
    "dtype",
    "is_draft_worker",
    "kv_cache_dtype",
    "model",
    "model_config",
    "page_size",
    "req_to_token_pool",
    "spec_algorithm",
    "token_to_kv_pool",
    "token_to_kv_pool_allocator",
    "use_mla_backend",
}
CALLED = {  # methods of SGLang's objects that ours call
    "AttentionBackendRegistry": {"get_handler": "0", "register": "0, 0"},
    "HookRegistry": {"apply_hooks": "", "register": "0, 0, 0"},
    "MLATokenToKVPool": {"get_key_buffer": "0"},
    "ForwardMode": dict.fromkeys(
        ("is_decode", "is_draft_extend_v2", "is_idle", "is_target_verify"), ""
    ),
    "DraftBackendFactory": {"_create_triton_decode_backend": ""},
}
MEMBERS = {
    "AttnForwardMethod": {"MLA"},
    "ForwardMode": {"DECODE"},
    "HookType": {"AROUND"},
    "VerifyMask": {"buffer", "mode", "max_bs", "is_read"},
}


@pytest.fixture(params=RECORDED, name="surface")
def _surface(request):
    return Surface(SURFACES / f"{request.param}.json")


@pytest.mark.parametrize(("owner", "called"), [(o, c) for o, cs in CALLS.items() for c in cs])
def test_calls_of_the_engine_fit(surface, owner, called):
    if called == "init_forward_metadata":  # of steps of drafts, called by another name
        assert surface.method("AttentionBackend", called) == "forward_batch"
        return
    ours = methods(OURS[owner])[called]
    assert surface.calls[called]
    for call in surface.calls[called]:
        accepts(ours, call)


def test_arguments_of_layers_fit(surface):
    """They call the backend's ``forward``, which puts itself and the batch between."""
    ours = methods(OURS["PagedMlaBackend"])["forward_extend"]
    for layer in ("attn_mqa", "attn_mha"):
        assert surface.calls[layer]
        for call in surface.calls[layer]:
            words = [word for word in call.split(", ") if not word.startswith("key_value_")]
            accepts(ours, ", ".join(["_", *words]))


def test_the_factory_of_drafts_fits(surface):
    """A hook gets the function that it is around, then what that is called with."""
    [create] = [
        node
        for node in ast.walk(SOURCES["drafts"])
        if isinstance(node, ast.FunctionDef) and node.name == "create"
    ]
    named = FACTORY.rsplit(".", 2)
    assert named[0] in surface.modules
    assert surface.method(named[1], named[2]) is not None
    for call in surface.calls[named[2]]:
        accepts(parameters(create), f"_, _, {call}")


@pytest.mark.parametrize("owner", OURS)
def test_calls_of_base_classes_fit(surface, owner):
    for method, call in calls_of_super(OURS[owner]):
        theirs = surface.method(bases(OURS[owner])[0], method)
        accepts(theirs or "", call)  # it has no __init__ of its own


@pytest.mark.parametrize("stem", SOURCES)
def test_imported_names_exist(surface, stem):
    for node in ast.walk(SOURCES[stem]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
            known = set(surface.names.get(node.module, "").split(", "))
            known |= set(surface.modules.get(node.module, {"classes": {}})["classes"])
            assert {alias.name for alias in node.names} <= known, node.module


def test_overridden_members_are_used_by_the_engine(surface):
    """A method that SGLang has renamed would never be called."""
    own = OURS["PagedMlaBackend"]
    known = surface.all_of("AttentionBackend", "methods") | surface.all_of(
        "AttentionBackend", "fields"
    )
    public = {name for name in (*methods(own), *fields(own)) if not name.startswith("_")}
    assert public - {"extend_dummy_seqs_capped_by_req_pool"} <= known  # that is 0.5.23's
    assert assigned(own) & known == set()  # nor is anything of theirs hidden


@pytest.mark.parametrize("name", READ)
def test_attributes_of_the_engines_objects_exist(surface, name):
    known = surface.all_of(name, "fields") | surface.all_of(name, "attributes")
    assert set(READ[name]) <= known


def test_attributes_of_a_runner_exist(surface):
    assert set(surface.runner.split(", ")) >= RUNNER


@pytest.mark.parametrize("name", CALLED)
def test_our_calls_fit(surface, name):
    for method, call in CALLED[name].items():
        theirs = surface.method(name, method)
        assert theirs is not None, method
        accepts(theirs, call)


@pytest.mark.parametrize("name", MEMBERS)
def test_members_exist(surface, name):
    assert MEMBERS[name] <= surface.all_of(name, "fields")


def test_the_entry_point_is_declared():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    declared = f'{NAME} = "paged_mla_optimized.engines.sglang.registration:register"'
    assert f'[project.entry-points."{GROUP}"]\n{declared}\n' in text
