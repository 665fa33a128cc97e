"""Our classes inside the vLLM that is installed: its own builder plans, its own names find us.

Needs vLLM's Python files and what they import, no GPU and no model: ``nox -s engines``.
"""

from __future__ import annotations

import inspect
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import prefill_step
import pytest
import torch
from ci.installed import import_or_skip
from mla_step import R, assert_close, build, dense, join
from record_vllm import SURFACES, record_vllm

from paged_mla_optimized.engines.releases import serves
from paged_mla_optimized.engines.vllm.record import record
from paged_mla_optimized.engines.vllm.registration import NAME, OWN_NAME, register
from paged_mla_optimized.engines.vllm.tools import check, invariance
from paged_mla_optimized.engines.vllm.tools.planted import HEALTHY, planted
from paged_mla_optimized.engines.vllm.tools.scenes import SCENES
from paged_mla_optimized.engines.vllm.versions import RECORDED
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import InvalidArgument, Unsupported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    vllm = import_or_skip("vllm", module_level=True)
    from vllm.config import AttentionConfig, CompilationConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention import mla_attention
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backends.mla.prefill.base import MLADimensions, MLAPrefillBackend
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum
    from vllm.v1.attention.backends.mla.prefill.selector import MLAPrefillSelectorConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm_step import builder_maker, common, engine_config, engine_layer

    from paged_mla_optimized.engines.heads import Keys
    from paged_mla_optimized.engines.vllm.backend import PagedMlaBackend
    from paged_mla_optimized.engines.vllm.impl import PagedMlaImpl
    from paged_mla_optimized.engines.vllm.prefill import PagedMlaPrefillBackend

pytestmark = pytest.mark.filterwarnings("ignore")

TAKES_NAMES = serves(vllm.__version__, (0, 32))
"""Whether plugins may add names to vLLM's enums."""
TAKES_NAMES_ONLY = pytest.mark.skipif(not TAKES_NAMES, reason="its enums take no names of plugins")

HOPPER = DeviceCapability(9, 0)
ASKED = {
    "head_size": 576,
    "dtype": torch.bfloat16,
    "kv_cache_dtype": "auto",
    "block_size": 64,
    "use_mla": True,
    "has_sink": False,
    "use_sparse": False,
    "use_mm_prefix": False,
    "use_per_head_quant_scales": False,
    "device_capability": HOPPER,
    "attn_type": "decoder",
}


def test_its_surface_is_the_recorded_one():
    if vllm.__version__ not in RECORDED:
        pytest.skip(f"vLLM {vllm.__version__} is not recorded")
    found = record_vllm(Path(vllm.__file__).parents[1], vllm.__version__)
    assert found == json.loads((SURFACES / f"{vllm.__version__}.json").read_text())


@pytest.mark.parametrize(
    ("members", "ours"),
    [
        (AttentionBackendEnum, PagedMlaBackend),
        (MLAPrefillBackendEnum, PagedMlaPrefillBackend),
    ],
)
def test_the_names_in_vllm_find_our_classes(members, ours):
    register()
    register()
    assert members[NAME].get_class() is ours
    assert members[ours.get_name()].get_class() is ours
    assert ours.get_name() == (OWN_NAME if TAKES_NAMES else NAME)


@TAKES_NAMES_ONLY
def test_our_name_selects_our_backend():
    register()
    assert AttentionConfig(backend=OWN_NAME.lower()).backend.get_class() is PagedMlaBackend
    prefill = AttentionConfig(mla_prefill_backend=OWN_NAME).mla_prefill_backend
    assert prefill.get_class() is PagedMlaPrefillBackend


@TAKES_NAMES_ONLY
@pytest.mark.parametrize("field", ["backend", "mla_prefill_backend"])
def test_a_spawned_process_reads_our_name_before_it_loads_plugins(field):
    register()
    config = AttentionConfig(**{field: OWN_NAME})
    read = f"import pickle, sys; print(pickle.load(sys.stdin.buffer).{field}.get_path())"
    child = subprocess.run(
        [sys.executable, "-c", read], input=pickle.dumps(config), stdout=subprocess.PIPE, check=True
    )
    assert child.stdout.decode().split()[-1] == getattr(config, field).get_path()


def test_another_plugin_keeps_the_name_that_all_share(caplog):
    register()
    member = AttentionBackendEnum[NAME]
    try:
        register_backend(member, "another.plugin.Backend")
        register()
        assert member.get_path() == "another.plugin.Backend"
        assert "CUSTOM: the name selects another.plugin.Backend instead of paged" in caplog.text
    finally:
        member.clear_override()
        register()


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"head_size": 320},
        {"dtype": torch.float16},
        {"kv_cache_dtype": "fp8"},
        {"block_size": 16},
        {"device_capability": DeviceCapability(8, 0)},
        {"use_kv_connector": True},
        {"use_batch_invariant": True},
    ],
)
def test_vllm_accepts_supported_models(change):
    assert PagedMlaBackend.validate_configuration(**(ASKED | change)) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float32}, "dtype"),
        ({"head_size": 512}, "head_size=512"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype=fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype=fp8_e5m2"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability 7.5"),
        ({"use_mla": False}, "non-MLA"),
        ({"use_sparse": True}, "sparse"),
        ({"has_sink": True}, "sinks"),
        ({"use_mm_prefix": True}, "multimodal"),
        ({"attn_type": "encoder"}, "encoder"),
        ({"use_non_causal": True}, "non-causal"),
    ],
)
def test_vllm_rejects_unsupported_models(change, reason):
    assert reason in " ".join(PagedMlaBackend.validate_configuration(**(ASKED | change)))


@pytest.mark.skipif(
    "use_pcp" not in inspect.signature(PagedMlaBackend.validate_configuration).parameters,
    reason="this release reads only the implementation class",
)
def test_vllm_rejects_prefill_context_parallelism():
    reasons = PagedMlaBackend.validate_configuration(**(ASKED | {"use_pcp": True}))
    assert "PCP not supported" in reasons


def test_vllm_accepts_our_prefill():
    for nope, value, reasons in ((128, 128, 0), (192, 256, 0), (100, 128, 1)):
        dims = MLADimensions(qk_nope_head_dim=nope, qk_rope_head_dim=64, v_head_dim=value)
        asked = MLAPrefillSelectorConfig(dtype=torch.bfloat16, mla_dimensions=dims)
        assert len(PagedMlaPrefillBackend.validate_configuration(HOPPER, asked)) == reasons


@pytest.fixture(name="make")
def _make(monkeypatch):
    return builder_maker(monkeypatch)


def attended(step, metadata, layer):
    """Call a layer's implementation with a cache whose blocks span layers."""
    impl = object.__new__(PagedMlaImpl)  # the rest of a layer needs a model
    layers = torch.stack([torch.full_like(step.cache, torch.nan), step.cache], dim=1)
    return impl.forward_mqa((step.q_nope, step.q_pe), layers[:, 1], metadata, layer)


def test_it_describes_a_step_with_drafts_and_padding(make):
    """S-17: captured, then planned again for a replay of fewer rows."""
    captured = build((3, 3), (3, 3), (3, 3), (3, 3))
    replayed = build((37, 3), (64, 2), (17, 1), (0, 0), padded_tokens=6, seed=1)
    layer = engine_layer(captured)
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False, method="ngram")
    config = engine_config(captured, speculative_config=drafts)
    builder = make(captured, config, layer, layer)
    assert builder.reorder_batch_threshold == 3
    metadata = builder.build_for_cudagraph_capture(common(captured, 3))
    assert_close(attended(captured, metadata, layer), dense(captured))
    metadata = builder.build(0, common(replayed, 3))
    assert (metadata.num_decodes, metadata.num_decode_tokens, metadata.num_prefills) == (4, 12, 0)
    assert_close(attended(replayed, metadata, layer), dense(replayed))


def test_a_graph_of_microbatches_reads_the_lengths_of_its_replays(make):
    """S-17: vLLM slices each step into new tensors; the captured ones are what a replay reads."""
    captured = build((3, 1), (3, 1))
    replayed = build((37, 1), (16, 1), seed=1)
    config, layer = engine_config(captured), engine_layer(captured)
    config.parallel_config.use_ubatching = True
    builder = make(captured, config, layer)
    of_graph = builder.build_for_cudagraph_capture(common(captured, 1)).decode.step
    step = builder.build(0, common(replayed, 1)).decode.step
    assert of_graph.query_start_loc.data_ptr() == step.query_start_loc.data_ptr()
    assert of_graph.seq_lens.tolist() == replayed.seq_lens.tolist()
    assert of_graph.query_start_loc.tolist() == replayed.cu_seqlens_q.tolist()


@pytest.mark.parametrize("name", [HEALTHY, "tables-of-other-rows"])
def test_its_steps_are_dumped(make, tmp_path, name):
    """The dump contains the values that vLLM passed, not those of an adapter with a fault."""
    explanation = import_or_skip("paged_mla_reference.explain.explanation")
    step = build((37, 1), (64, 1), (17, 1))
    step.cache.nan_to_num_(0.5)  # engines keep numbers everywhere
    layer = engine_layer(step, layer_name="0")
    said, last = common(step, 1), step.seq_lens.long() - 1
    said.slot_mapping = step.block_table[torch.arange(3), last // 16] * 16 + last % 16
    with planted(name), record(PagedMlaBackend, tmp_path) as samples:
        metadata = make(step, engine_config(step), layer).build(0, said)
        impl = object.__new__(PagedMlaImpl)  # the rest of a layer needs a model
        vars(impl).update({n: v for n, v in vars(layer).items() if n != "num_heads"})
        impl.forward_mqa((step.q_nope, step.q_pe), step.cache, metadata, layer)
    found = explanation.explain(load_dump(samples.written[0]))
    assert not [f for f in found.found.findings if f.state == "broken" and f.stage == "metadata"]
    expected = "every row reads through the table of the row before it"
    assert [f.hypothesis.name for f in found.best[:1]] == [expected] * (name != HEALTHY)


def test_it_describes_a_rank_of_two(make, monkeypatch):
    """S-18: heads of both ranks, and lengths of this one; rows have one token each."""
    group = SimpleNamespace(world_size=2, rank_in_group=0)
    monkeypatch.setattr(mla_attention, "get_dcp_group", lambda: group)
    layer_parts = {}
    if hasattr(mla_attention, "MLADCPManager"):
        manager = type(
            "Manager",
            (mla_attention.MLADCPManager,),
            {"__init__": lambda _: None, "init_kv_gather": lambda *_: None},
        )
        layer_parts["dcp_manager"] = manager()
    step = build((25, 1), (0, 1))  # of 50 tokens, and of a row of which the other rank has all
    config = engine_config(step)
    config.parallel_config.decode_context_parallel_size = 2
    heads = step.config.num_heads // 2
    config.model_config.get_num_attention_heads = lambda _: heads
    layer = engine_layer(step, num_heads=heads, **layer_parts)
    builder = make(step, config, layer)
    assert builder.reorder_batch_threshold == 1
    whole = common(step, 1)
    whole.dcp_local_seq_lens, whole.seq_lens = step.seq_lens, torch.tensor([50, 1]).int()
    metadata = builder.build(0, whole)
    assert metadata.decode.dcp_tot_seq_lens.tolist() == [50, 1]
    joined = torch.cat([step.q_nope, step.q_pe], dim=-1)
    impl = object.__new__(PagedMlaImpl)
    assert_close(impl.forward_mqa(joined, step.cache, metadata, layer), dense(step))


def test_a_layer_is_made_or_refused(monkeypatch):
    parallel = SimpleNamespace(cp_kv_cache_interleave_size=1, decode_context_parallel_size=1)
    config = SimpleNamespace(parallel_config=parallel)
    monkeypatch.setattr(mla_attention, "get_current_vllm_config", lambda: config)
    plain = {
        "num_heads": 4,
        "head_size": 576,
        "scale": 0.1,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": "fp8",
        "logits_soft_cap": None,
        "attn_type": "decoder",
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
        "indexer": None,
    }
    impl = PagedMlaImpl(**plain)
    assert impl.can_return_lse_for_decode
    assert impl.lse_base_on_e
    assert not impl.supports_quant_query_input  # else queries would come as FP8
    for change in (
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"alibi_slopes": [1.0]},
        {"attn_type": "encoder"},
    ):
        with pytest.raises(Unsupported, match="is not supported by paged_mla"):
            PagedMlaImpl(**(plain | change))


def prefill_backend(step):
    """Return our prefill as a layer of vLLM has it."""
    return PagedMlaPrefillBackend(
        num_heads=2,
        scale=step.config.softmax_scale,
        kv_lora_rank=R,
        qk_nope_head_dim=prefill_step.NOPE,
        qk_rope_head_dim=prefill_step.ROPE,
        v_head_dim=prefill_step.V,
        vllm_config=engine_config(build((1, 1))),
    ).clone()


def test_prefill_rows_go_through_its_calls():
    """S-21: new tokens, and a chunk of context, in the words of the installed release."""
    step = prefill_step.build((7, 7), (20, 20))
    context = prefill_step.build((33, 7), (0, 20), causal=False)
    backend = prefill_backend(step)
    starts, keys = prefill_step.prefix_sums([7, 20]), prefill_step.prefix_sums([33, 0])
    chunk = SimpleNamespace(index=0, query_start_loc=starts, cu_seq_lens=keys)
    backend.prepare_metadata(
        SimpleNamespace(query_start_loc=starts, chunked_context=SimpleNamespace(cu_seq_lens=[keys]))
    )
    taken = inspect.signature(MLAPrefillBackend.run_prefill_context_chunk).parameters
    which = {"chunk": chunk} if "chunk" in taken else {"chunk_idx": 0}
    for _ in range(2):  # layers
        out, lse = backend.run_prefill_new_tokens(**heads(step), return_softmax_lse=True)
        prefill_step.assert_close((out, lse.t()), step)
        out, lse = backend.run_prefill_context_chunk(**heads(context), **which)
        prefill_step.assert_close((out, lse.t()), context)
    assert backend.run_prefill_new_tokens(**heads(step), return_softmax_lse=False).shape[0] == 27


class _Theirs:
    """Another prefill backend, as far as vLLM calls it without contexts."""

    def run_prefill_new_tokens(self, k, v, **_):
        self.keys = k
        return torch.zeros_like(v)


def layer_of_prefill(step):
    """Return an implementation whose projection gives the keys and values of a step."""
    impl = object.__new__(PagedMlaImpl)  # the rest of a layer needs a model
    projected = torch.cat([step.k_nope, step.v], dim=-1).flatten(start_dim=1)
    sizes = {"num_heads": 2, "qk_nope_head_dim": prefill_step.NOPE, "v_head_dim": prefill_step.V}
    left = {"dcp_world_size": 1, "_use_flashinfer_concat_mla_k": False}
    vars(impl).update(sizes | left | {"kv_b_proj": lambda _: (projected, None)})
    return impl


def test_a_layer_hands_prefill_rows_on_without_copies():
    """Ours reads positions once and writes into vLLM's output; others get what vLLM makes."""
    step = prefill_step.build((7, 7), (20, 20))
    starts = prefill_step.prefix_sums([7, 20])
    q = torch.cat([step.q_nope, step.q_pe], dim=-1)
    impl, ours, theirs = layer_of_prefill(step), prefill_backend(step), _Theirs()
    output = torch.full((27, 2 * prefill_step.V), torch.nan)
    for backend in (ours, theirs, ours):
        prefill = SimpleNamespace(
            query_start_loc=starts,
            chunked_context=None,
            prefill_backend=backend,
            q_data_type=q.dtype,
        )
        ours.prepare_metadata(prefill)
        given = (None, step.k_pe[:, None], None, SimpleNamespace(prefill=prefill), None)
        impl.forward_mha(q, *given, output=output.fill_(torch.nan))
    lse = ours.run_prefill_new_tokens(**heads(step), return_softmax_lse=True)[1]
    prefill_step.assert_close((output.view(27, 2, -1), lse.t()), step)
    assert torch.equal(theirs.keys, heads(step)["k"])


def test_a_chunk_of_context_is_handed_on_without_copies():
    """vLLM joins keys of new tokens and of contexts by one method."""
    step = prefill_step.build((7, 7), (20, 20))
    impl = layer_of_prefill(step)
    k_pe = step.k_pe[:, None]
    impl._keys_stay_apart = False
    assert torch.equal(impl._concat_k_nope_k_pe(step.k_nope, k_pe), heads(step)["k"])
    impl._keys_stay_apart = True
    assert impl._concat_k_nope_k_pe(step.k_nope, k_pe) == Keys(step.k_nope, k_pe)
    used = inspect.getsource(mla_attention)
    assert used.count("self._concat_k_nope_k_pe(k_nope, k_pe)") == 3  # two kinds of context


def heads(step):
    """Return queries, keys and values of heads as the layer makes them."""
    k_pe = step.k_pe[:, None].expand(-1, step.config.num_heads, -1)
    return {
        "q": torch.cat([step.q_nope, step.q_pe], dim=-1),
        "k": torch.cat([step.k_nope, k_pe], dim=-1),
        "v": step.v,
    }


def test_capacities_follow_its_config(make):
    step = build((1, 1))
    config = engine_config(step, additional_config={"paged_mla": {"absorbed_query_len": 5}})
    found = make(step, config, engine_layer(step)).decode.mla.config
    assert (found.max_rows, found.max_query_tokens, found.num_heads) == (16, 64, 4)
    assert found.softmax_scale == step.config.softmax_scale


def test_a_draft_model_has_heads_of_its_own(make):
    """vLLM 0.25 passes the number of heads of the target."""
    target = build((1, 1), num_heads=4)
    draft = engine_layer(target, num_heads=2)
    assert make(target, engine_config(target), draft, draft).decode.mla.config.num_heads == 2


@pytest.mark.parametrize("says", ["0", "1"])
def test_bits_do_not_depend_on_other_rows(make, monkeypatch, says):
    """S-20: with VLLM_BATCH_INVARIANT the bits of a row are the same in every step."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", says)
    alone = build((200, 1), num_heads=16)
    among = join(alone, build((230, 3), (40, 2), num_heads=16, padded_tokens=2, seed=1))
    drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False, method="ngram")
    layer = engine_layer(alone)
    builder = make(alone, engine_config(alone, speculative_config=drafts), layer)
    assert builder.decode.mla.config.batch_invariant == (says == "1")
    found = [
        attended(step, builder.build(0, common(step, query_len)), layer)[0][0]
        for step, query_len in ((alone, 1), (among, 3))
    ]
    assert torch.equal(*found) == (says == "1")


def test_short_prompts_that_may_go_either_way_are_refused(make, monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    step = build((1, 1))
    config = engine_config(step, additional_config={"paged_mla": {"absorbed_query_len": 5}})
    with pytest.raises(Unsupported, match=r"absorbed_query_len=5 .* with VLLM_BATCH_INVARIANT"):
        make(step, config, engine_layer(step))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scale": 0.5}, "scale"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        ({"num_heads": 2}, "num_heads"),
    ],
)
def test_layers_that_differ_are_refused(make, changes, reason):
    step = build((1, 1))
    layers = engine_layer(step), engine_layer(step, **changes)
    with pytest.raises(Unsupported, match=f"one KV cache group .* different values of {reason}"):
        make(step, engine_config(step), *layers)


def test_an_unknown_option_is_rejected(make):
    step = build((1, 1))
    config = engine_config(step, additional_config={"paged_mla": {"fast": True}})
    with pytest.raises(InvalidArgument, match=r"paged_mla\.fast"):
        make(step, config, engine_layer(step))


@pytest.mark.parametrize("name", SCENES)
def test_vllm_has_the_arguments_of_a_workload(name):
    """The test checks only names; tests on a GPU check their effect."""
    given = check._given((Path("model"), Path("drafts")), SCENES[name], NAME)
    taken = inspect.signature(EngineArgs).parameters
    assert set(given) <= set(taken)
    described = inspect.signature(CompilationConfig).parameters
    assert set(given.get("compilation_config", {})) <= set(described)


@pytest.mark.parametrize("scene", invariance.COMMAND.scenes.values())
def test_vllm_has_the_arguments_of_invariance(scene):
    given = invariance.given(Path("model"), scene)
    assert set(given) <= set(inspect.signature(EngineArgs).parameters)
