"""Our classes inside the SGLang that is installed: its pools, layers, views and tables of names.

Needs SGLang's Python files and what they import, no GPU and no model: ``nox -s engines``.
"""

from __future__ import annotations

import inspect
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import prefill_step
import pytest
import torch
from ci.installed import import_or_skip
from mla_step import P, R, build, dense, join
from record_sglang import SURFACES, record_sglang
from sglang_step import CONTEXTS, SPARE, context, hold

from paged_mla_optimized.engines.sglang import registration
from paged_mla_optimized.engines.sglang.registration import NAME
from paged_mla_optimized.engines.sglang.tools import answer, invariance
from paged_mla_optimized.engines.sglang.tools.scenes import EVERY_SCENE
from paged_mla_optimized.engines.sglang.versions import RECORDED
from paged_mla_optimized.engines.tools import model as models
from paged_mla_shared.errors import InvalidArgument, Unsupported

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    sglang = import_or_skip("sglang", module_level=True)
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
        get_req_to_token_pool,
        get_token_to_kv_pool,
    )
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
    from sglang.srt.models.deepseek_common import attention_backend_handler
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mla
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )
    from sglang.srt.models.deepseek_common.utils import FORWARD_ABSORB_CORE_ATTENTION_BACKENDS
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative import draft_utils
    from sglang.srt.speculative.eagle_utils import TreeMaskMode
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from transformers import PretrainedConfig

    from paged_mla_optimized.engines.sglang import backend as ours
    from paged_mla_optimized.engines.sglang.backend import PagedMlaBackend
    from paged_mla_optimized.engines.sglang.dispatch import teach
    from paged_mla_optimized.engines.sglang.drafts import PagedMlaDraftBackend

pytestmark = pytest.mark.filterwarnings("ignore")

VERSION = registration.version("sglang")
DRAFTS = 4
NOPE = 64  # heads are not as wide as latents


@pytest.fixture(name="settings", autouse=True)
def _settings(monkeypatch):
    """Replace SGLang's global arguments and the checks of a GPU; float32 is allowed."""
    settings = context(graph=SimpleNamespace(cuda_graph_config=CudaGraphConfig()))
    for name in CONTEXTS:
        monkeypatch.setattr(ours, name, lambda: settings)
    monkeypatch.setattr(ours, "misfit", lambda **_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return settings


def attention(head_dim, value, *, heads=4, kv_heads=1):
    return RadixAttention(heads, head_dim, 0.2, kv_heads, layer_id=0, v_head_dim=value)


def test_adapters_of_kv_b_proj_are_its_own_work():
    """It corrects absorbed queries in front of a backend, and values behind it (sglang#25001)."""
    source = inspect.getsource(forward_mla)
    prepare, core = (source.index(f"def forward_absorb_{part}(") for part in ("prepare", "core"))
    assert prepare < source.index("q_correction(", prepare) < core
    assert "v_correction(" in source[core:]


def runner_of(step, held, **changes):
    """Return what a backend reads of a model runner: SGLang's own pools hold the step."""
    requests = ReqToTokenPool(8, step.config.max_model_len, "cpu", enable_memory_saver=False)
    requests.req_to_token[: len(held.req_to_token)] = held.req_to_token
    size = step.config.block_size
    tokens = MLATokenToKVPool(
        size=len(held.pool) - size,
        page_size=size,
        dtype=torch.float32,
        kv_lora_rank=R,
        qk_rope_head_dim=P,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
    )
    tokens.kv_buffer[0].copy_(held.pool)
    model = torch.nn.ModuleList(
        [
            attention(R + P, R),
            attention(NOPE + P, prefill_step.V, kv_heads=4),
        ]
    )
    parts = {
        "model": model,
        "model_config": SimpleNamespace(
            kv_lora_rank=R,
            qk_rope_head_dim=P,
            qk_nope_head_dim=NOPE,
            v_head_dim=prefill_step.V,
            context_len=128,
            hf_config=PretrainedConfig(),
            hf_text_config=SimpleNamespace(),
            linear_attn_registry_result=None,
        ),
        "req_to_token_pool": requests,
        "token_to_kv_pool": tokens,
        "token_to_kv_pool_allocator": SimpleNamespace(),
        "spec_algorithm": SpeculativeAlgorithm.from_string(None),
        "use_mla_backend": True,
        "is_draft_worker": False,
        "page_size": size,
        "dtype": torch.float32,
        "kv_cache_dtype": torch.float32,
        "device": "cpu",
    }
    return SimpleNamespace(**(parts | changes))


def batch_of(step, held, mode, **changes):
    """Return a batch whose rows are the step's; the host knows no lengths."""
    tokens = torch.zeros(len(step.q_nope))
    parts = {
        "forward_mode": mode,
        "batch_size": len(step.rows),
        "input_ids": tokens,
        "positions": tokens,
        "req_pool_indices": held.request_ids,
        "seq_lens": step.seq_lens.long(),
        "seq_lens_sum": None,
        "out_cache_loc": held.out_cache_loc,
    }
    return ForwardBatch(**(parts | changes))


def forwarded(backend, runner, step, held, batch):
    """Call a layer over latents, queries and keys in two parts."""
    layer = runner.model[0]
    return backend.forward(
        step.q_nope,
        held.latents[:, None],
        held.latents[:, None],
        layer,
        batch,
        q_rope=step.q_pe,
        k_rope=held.keys[:, None],
    ).view(len(step.q_nope), -1, R)


def assert_outputs(out, step, visible=None):
    expected, _ = dense(step, visible)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_its_surface_is_the_recorded_one():
    if VERSION not in RECORDED:
        pytest.skip(f"SGLang {VERSION} is not recorded")
    found = record_sglang(Path(sglang.__file__).parents[1], VERSION)
    assert found == json.loads((SURFACES / f"{VERSION}.json").read_text())


def test_the_tables_in_sglang_contain_our_backend():
    from sglang.srt import server_args  # noqa: PLC0415 - it may not be installed

    step = build((20, 1))
    registration.register()
    assert NAME in server_args.ATTENTION_BACKEND_CHOICES
    assert NAME in server_args.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS
    assert NAME in server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES
    assert NAME in server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    runner = runner_of(step, hold(step))
    backend = ATTENTION_BACKENDS[NAME](runner)
    assert isinstance(backend, PagedMlaBackend)
    with forward_context(ForwardContext(attn_backend=backend)):  # where layers find their pools
        assert get_token_to_kv_pool() is runner.token_to_kv_pool
        assert get_req_to_token_pool() is runner.req_to_token_pool
    assert not backend.needs_cpu_seq_lens
    assert NAME in FORWARD_ABSORB_CORE_ATTENTION_BACKENDS


def test_a_captured_step_and_a_replay_of_fewer_rows():
    """S-17: SGLang's view of a replay, whose slots are not padded."""
    captured, replayed = build((1, 1), (1, 1), (1, 1)), build((37, 1), (16, 1), seed=1)
    first, held = hold(captured), hold(replayed)
    runner = runner_of(replayed, held)
    backend = PagedMlaBackend(runner)
    backend.init_cuda_graph_state(8, 8)
    batch = batch_of(captured, first, ForwardMode.DECODE, req_pool_indices=torch.zeros(3).long())
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    buffers = SimpleNamespace(
        input_ids=torch.zeros(8),
        positions=torch.zeros(8),
        req_pool_indices=torch.tensor([SPARE, SPARE + 1, 0]),
        seq_lens=torch.tensor([37, 16, backend.get_cuda_graph_seq_len_fill_value()]),
        seq_lens_cpu=None,
        mamba_track_indices=None,
        encoder_lens=None,
    )
    given = {
        "forward_batch": batch_of(replayed, held, ForwardMode.DECODE),
        "buffers": buffers,
        "bs": 3,
        "raw_bs": 2,
        "num_tokens": 3,
        "seq_len_fill_value": 1,
        "capture_forward_mode": ForwardMode.DECODE,
        "is_encoder_decoder": False,
    }
    others = dict.fromkeys(inspect.signature(build_replay_fb_view).parameters)
    view = build_replay_fb_view(**(others | given))
    backend.init_forward_metadata_out_graph(view)
    q = [torch.cat([tensor, tensor[:1]]) for tensor in (replayed.q_nope, replayed.q_pe)]
    new = [torch.cat([t, t[:1]]) for t in (held.latents, held.keys)]
    static = torch.cat([held.out_cache_loc, torch.zeros(1).long()])
    joined = backend.forward(  # as layers that are not told of parts hand them over
        torch.cat(q, dim=-1),
        torch.cat(new, dim=-1)[:, None],
        new[0][:, None],
        runner.model[0],
        batch_of(replayed, held, ForwardMode.DECODE, out_cache_loc=static),
    )
    assert_outputs(joined.view(3, -1, R)[:2], replayed)
    with pytest.raises(InvalidArgument, match="max_bs"):
        backend.init_cuda_graph_state(9, 9)


def test_graphs_that_plan_are_left_alone(monkeypatch):
    """S-17: what a graph recorded, its replays plan; eager steps and other graphs are planned."""
    step = build((37, 1), (16, 1))
    held = hold(step)
    backend = PagedMlaBackend(runner_of(step, held))
    batch = batch_of(step, held, ForwardMode.DECODE)
    one_row = batch_of(step, held, ForwardMode.DECODE, batch_size=1)
    monkeypatch.setattr(backend.rows, "plan", Mock(wraps=backend.rows.plan))
    planned, capturing = backend.rows.plan, [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)  # before the capture, to warm up
    backend.init_forward_metadata_out_graph(batch)
    assert planned.call_count == 3
    capturing[0] = True
    backend.init_forward_metadata_in_graph(batch)
    capturing[0] = False
    backend.init_forward_metadata_out_graph(batch)  # before a replay
    assert planned.call_count == 4
    backend.init_forward_metadata_out_graph(one_row)
    backend.init_forward_metadata(batch)
    assert planned.call_count == 6


@pytest.mark.parametrize("spelling", ["full", "qlen"])
def test_trees_of_drafts(settings, spelling):
    """S-14: masks of n-grams cover the context; masks of a draft model are in our buffer."""
    settings.speculative_num_draft_tokens = DRAFTS
    settings.speculative_eagle_topk = 2
    step = build((36, DRAFTS), (20, DRAFTS))
    held = hold(step)
    runner = runner_of(step, held)
    if spelling == "full":
        runner.spec_algorithm = SpeculativeAlgorithm.from_string("NGRAM")
        settings.speculative_eagle_topk = None
    backend = PagedMlaBackend(runner)
    own = backend.verify_mask
    assert (own.mode, own.is_read, own.fits(8)) == (TreeMaskMode.QLEN_ONLY, True, True)
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
    visible = [
        torch.cat([torch.ones(DRAFTS, seq_len - DRAFTS).bool(), tree], dim=1)
        for seq_len, _ in step.rows
    ]
    if spelling == "full":
        mask = torch.cat([seen.flatten() for seen in visible])
    else:
        mask = own.buffer
        mask[: 2 * DRAFTS**2] = tree.flatten().repeat(2)
    spec = SimpleNamespace(custom_mask=mask, draft_token_num=DRAFTS)
    batch = batch_of(
        step, held, ForwardMode.TARGET_VERIFY, seq_lens=step.seq_lens - DRAFTS, spec_info=spec
    )
    backend.init_forward_metadata(batch)
    assert_outputs(forwarded(backend, runner, step, held, batch), step, visible)
    with pytest.raises(Unsupported, match="OVERLAP_PLAN_STREAM"):  # the plan has read the mask
        backend.update_verify_buffers_to_fill_after_draft(spec, None)


def test_chains_of_drafts_need_no_mask(settings):
    settings.speculative_num_draft_tokens = DRAFTS
    settings.speculative_eagle_topk = 1
    step = build((36, DRAFTS), (20, DRAFTS))
    held = hold(step)
    runner = runner_of(step, held)
    backend = PagedMlaBackend(runner)
    assert not backend.verify_mask.is_read
    backend.update_verify_buffers_to_fill_after_draft(None, None)
    spec = SimpleNamespace(custom_mask=None, draft_token_num=DRAFTS)
    batch = batch_of(
        step, held, ForwardMode.TARGET_VERIFY, seq_lens=step.seq_lens - DRAFTS, spec_info=spec
    )
    backend.init_forward_metadata(batch)
    assert_outputs(forwarded(backend, runner, step, held, batch), step)


def test_a_draft_models_window_and_steps(settings, monkeypatch):
    """Both come from SGLang's factory: a padded window of a graph, then two steps of a chain."""
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (NAME, NAME), raising=False)
    settings.speculative_num_draft_tokens = 3
    window = build((36, 3), (20, 3))
    held = hold(window)
    runner = runner_of(window, held, is_draft_worker=True, draft_attention_backend=NAME)
    registration.hook_drafts()
    factory = object.__new__(draft_utils.DraftBackendFactory)  # its arguments differ by release
    factory.__dict__.update(
        draft_model_runner=runner,
        draft_attn_backend=NAME,
        topk=1,
        speculative_num_steps=3,
        server_args=None,
        qsa_profile=None,
    )
    tables = SimpleNamespace(
        steps={"triton": factory._create_triton_decode_backend},
        windows={"triton": factory._create_triton_prefill_backend},
    )
    backend = factory._create_backend("decode_attention_backend", tables.windows, "{backend_type}")
    assert isinstance(backend, PagedMlaBackend)
    assert backend.verify_mask is None
    padded = SimpleNamespace(
        forward_mode=ForwardMode.DRAFT_EXTEND_V2,
        batch_size=3,
        req_pool_indices=torch.tensor([SPARE, SPARE + 1, 0, 0]),
        seq_lens=torch.tensor([36, 20, 1, 1]),
        out_cache_loc=torch.cat([held.out_cache_loc, torch.zeros(3).long()]),
        extend_seq_lens_cpu=[3] * 3,
    )
    backend.init_forward_metadata_out_graph(padded, in_capture=True)
    replayed = SimpleNamespace(**(vars(padded) | {"out_cache_loc": held.out_cache_loc}))
    backend.init_forward_metadata_out_graph(replayed)  # as its runner has it: slots not padded
    q = [torch.cat([tensor, tensor[:3]]) for tensor in (window.q_nope, window.q_pe)]
    new = [torch.cat([t, t[:3]])[:, None] for t in (held.latents, held.keys)]
    out = backend.forward(
        q[0], new[0], new[0], runner.model[0], padded, q_rope=q[1], k_rope=new[1]
    ).view(9, -1, R)
    assert_outputs(out[:6], window)
    assert out.isfinite().all()

    steps = factory._create_backend("decode_attention_backend", tables.steps, "{backend_type}")
    assert isinstance(steps, PagedMlaDraftBackend)
    assert len(steps.attn_backends) == 2
    assert not steps.needs_cpu_seq_lens
    for ahead, inner in enumerate(steps.attn_backends, start=1):
        drafted = build((20 + ahead, 1), (7 + ahead, 1), seed=ahead)
        cached = hold(drafted)
        inner_runner = runner_of(drafted, cached, is_draft_worker=True)
        one = PagedMlaDraftBackend(inner_runner, 1, 3).attn_backends[ahead - 1]
        assert one._ahead == inner._ahead == ahead
        batch = batch_of(drafted, cached, ForwardMode.DECODE, seq_lens=drafted.seq_lens - ahead)
        one.init_forward_metadata(batch)
        assert_outputs(forwarded(one, inner_runner, drafted, cached, batch), drafted)
    with pytest.raises(Unsupported, match="speculative_eagle_topk=4"):
        PagedMlaDraftBackend(runner, 4, 3)


def test_layers_read_the_name_of_their_draft_backend(monkeypatch):
    """A layer that took the target's name for it would hand over queries in two parts."""
    monkeypatch.setattr(draft_utils, "attention_backends", lambda: (NAME, NAME), raising=False)
    runner = SimpleNamespace(
        draft_attention_backend="triton",
        model_config=SimpleNamespace(hf_config=None, hf_text_config=None),
        **dict.fromkeys(("hybrid_gdn_config", "mambaish_config", "linear_attn_model_spec")),
    )
    registration.hook_drafts()
    factory = object.__new__(draft_utils.DraftBackendFactory)
    factory.__dict__.update(
        draft_model_runner=runner,
        draft_attn_backend="triton",
        speculative_num_steps=3,
        qsa_profile=None,
    )
    steps = SimpleNamespace(attn_backends=[AttentionBackend(), AttentionBackend()])
    is_named = "stamps_children" in inspect.signature(factory._create_backend).parameters
    made = ("triton", steps) if is_named else steps
    monkeypatch.setattr(
        draft_utils.DraftBackendFactory, "_create_triton_decode_backend", lambda _: made
    )
    for backend in (factory.create_decode_backend(), *steps.attn_backends):
        assert backend.decode_attention_backend_str == "triton"
        assert backend.prefill_attention_backend_str == "triton"


def test_prompts_go_either_way():
    """S-21: over latents with what is cached; over heads alone, and to a chunk of the cached."""
    step = build((40, 20), (17, 7))
    held = hold(step)
    runner = runner_of(step, held)
    backend = PagedMlaBackend(runner)
    lens = {"extend_seq_lens": torch.tensor([20, 7]).int()}
    batch = batch_of(step, held, ForwardMode.EXTEND, **lens)
    backend.init_forward_metadata(batch)
    assert_outputs(forwarded(backend, runner, step, held, batch), step)

    alone = prefill_step.build((20, 20), (7, 7), qk_nope_head_dim=NOPE, num_heads=4)
    out = over_heads(backend, runner, alone, batch)
    chunk = prefill_step.build((9, 20), (0, 7), causal=False, qk_nope_head_dim=NOPE, num_heads=4)
    batch.attn_attend_prefix_cache, batch.mha_return_lse = True, True
    batch.prefix_chunk_idx, batch.prefix_chunk_cu_seq_lens = 0, torch.tensor([[0, 9, 9]]).int()
    of_chunk, lse = over_heads(backend, runner, chunk, batch)
    prefill_step.assert_close((of_chunk, lse), chunk)
    expected, _ = prefill_step.dense(alone)
    torch.testing.assert_close(
        out.view(27, 4, -1).double(), torch.from_numpy(expected), rtol=2e-5, atol=2e-5
    )


def over_heads(backend, runner, step, batch):
    k_pe = step.k_pe[:, None].expand(-1, step.config.num_heads, -1)
    q = torch.cat([step.q_nope, step.q_pe], dim=-1)
    k = torch.cat([step.k_nope, k_pe], dim=-1)
    return backend.forward(q, k, step.v, runner.model[1], batch, save_kv_cache=False)


def test_codes_with_a_scale_go_over_latents():
    """SGLang's own writer, in the way over heads, does not divide by it."""
    teach(NAME, is_fp8=True, takes_parts=True)
    handle = AttentionBackendRegistry.get_handler(NAME)
    scaled = SimpleNamespace(attn_mqa=SimpleNamespace(k_scale_float=0.5))
    assert handle(scaled, None) is AttnForwardMethod.MLA


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_bits_do_not_depend_on_other_rows(settings, monkeypatch, batch_invariant):
    """S-20: with deterministic inference all prompts go over latents, and keep their bits."""
    settings.deterministic.enable_deterministic_inference = batch_invariant
    settings.disable_radix_cache, settings.chunked_prefill_size = True, -1
    monkeypatch.setattr(attention_backend_handler, "get_exec", lambda: settings)
    step = build((200, 1), num_heads=16)
    together, found = join(step, build((250, 40), (9, 9), num_heads=16, seed=1)), []
    for one in (step, together):
        held = hold(one)
        runner = runner_of(one, held, model=torch.nn.ModuleList([attention(R + P, R, heads=16)]))
        backend = ATTENTION_BACKENDS[NAME](runner)
        batch = batch_of(one, held, ForwardMode.EXTEND, extend_seq_lens=one.cu_seqlens_q.diff())
        backend.init_forward_metadata(batch)
        found.append(forwarded(backend, runner, one, held, batch)[:1])
    assert torch.equal(*found) == batch_invariant
    if batch_invariant:
        handle = AttentionBackendRegistry.get_handler(NAME)
        layer = SimpleNamespace(attn_mqa=SimpleNamespace(k_scale_float=None))
        assert handle(layer, batch) is AttnForwardMethod.MLA


def test_options_that_split_prompts_are_rejected(settings):
    settings.deterministic.enable_deterministic_inference = True
    step = build((20, 1))
    runner = runner_of(step, hold(step))
    with pytest.raises(Unsupported, match="set disable_radix_cache=True"):
        PagedMlaBackend(runner)
    settings.disable_radix_cache = True
    with pytest.raises(Unsupported, match=r"chunked_prefill_size=32 .* to -1"):
        PagedMlaBackend(runner)
    settings.chunked_prefill_size = None
    assert PagedMlaBackend(runner).rows.config.batch_invariant


def test_an_idle_rank_plans_nothing():
    step = build((20, 1))
    backend = PagedMlaBackend(runner_of(step, hold(step)))
    backend.init_forward_metadata(batch_of(step, hold(step), ForwardMode.IDLE, batch_size=0))


def test_unsupported_models_and_steps(settings):
    step = build((20, 1))
    held = hold(step)
    plain = runner_of(step, held)
    backend = PagedMlaBackend(plain)
    prompt = batch_of(step, held, ForwardMode.EXTEND, extend_seq_lens=torch.tensor([1]))
    with pytest.raises(Unsupported, match="full CUDA graph"):
        backend.init_forward_metadata_out_graph(prompt, in_capture=True)
    for change, reason in (
        ({"use_mla_backend": False}, "without MLA"),
        ({"kv_cache_dtype": torch.float8_e5m2}, "kv_cache_dtype"),
        ({"model": torch.nn.ModuleList()}, "without layers over latents"),
        ({"token_to_kv_pool": SimpleNamespace(use_dsa=True)}, "sparse attention"),
        (
            {"token_to_kv_pool_allocator": SimpleNamespace(translate_kv_loc=len)},
            "unified memory pool",
        ),
    ):
        with pytest.raises(Unsupported, match=reason):
            PagedMlaBackend(runner_of(step, held, **change))
    settings.dcp_enabled = True
    with pytest.raises(Unsupported, match="context parallelism"):
        PagedMlaBackend(plain)


@pytest.mark.parametrize("name", EVERY_SCENE)
def test_sglang_has_the_arguments_of_a_workload(name, monkeypatch):
    """The test checks only names; tests on a GPU check their effect."""
    monkeypatch.setattr(models, "build_model", lambda folder, **_: folder)
    given = answer.given(EVERY_SCENE[name], NAME, Path("model"))
    assert set(given) <= set(inspect.signature(ServerArgs).parameters)


@pytest.mark.parametrize("scene", invariance.COMMAND.scenes.values())
def test_sglang_has_the_arguments_of_invariance(scene):
    given = invariance.given(Path("model"), scene)
    assert set(given) <= set(inspect.signature(ServerArgs).parameters)
