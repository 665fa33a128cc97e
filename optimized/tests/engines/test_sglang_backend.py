"""The backend class on as much of SGLang as it imports: what it plans, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mla_step import R, build, dense
from sglang_step import hold
from sglang_stub import Mode, runner_of, stubbed, stubbed_dispatch

from paged_mla_shared.errors import Unsupported

WINDOW = 4


def attended(backend, runner, batch, q, new):
    """Call a layer; queries and keys in two parts."""
    latents, keys = (tensor[:, None] for tensor in new)
    out = backend.forward_extend(
        q[0], latents, latents, runner.model[0], batch, q_rope=q[1], k_rope=keys
    )
    return out.view(len(q[0]), -1, R)


def padded(tensors, lines):
    return [torch.cat([t, t.new_zeros(lines, *t.shape[1:])]) for t in tensors]


def test_a_replay_of_fewer_windows_than_were_captured():
    """S-16, S-17: a draft's extension, rows padded to a graph of four, slots as they are."""
    step = build((36, WINDOW), (20, WINDOW), (50, WINDOW))
    held = hold(step)
    with stubbed(speculative_num_draft_tokens=WINDOW) as module:
        runner = runner_of(step, held, is_draft_worker=True)
        backend = module.PagedMlaBackend(runner)
        buffers = SimpleNamespace(
            ids=torch.zeros(8).long(),
            lens=torch.ones(8).long(),
            slots=torch.zeros(8 * WINDOW).long(),
        )

        def batch_of(rows, tokens):
            return SimpleNamespace(
                forward_mode=Mode("draft-extend"),
                batch_size=rows,
                req_pool_indices=buffers.ids,
                seq_lens=buffers.lens,
                out_cache_loc=buffers.slots[:tokens],
                extend_seq_lens_cpu=[WINDOW] * rows,
                spec_info=None,
            )

        captured = batch_of(4, 4 * WINDOW)
        backend.init_forward_metadata_out_graph(captured, in_capture=True)
        buffers.ids[:3], buffers.lens[:3] = held.request_ids, step.seq_lens
        buffers.slots[: 3 * WINDOW] = held.out_cache_loc
        backend.init_forward_metadata_out_graph(batch_of(4, 3 * WINDOW))
        q = padded([step.q_nope, step.q_pe], WINDOW)
        new = padded([held.latents, held.keys], WINDOW)
        out = attended(backend, runner, captured, q, new)
        torch.testing.assert_close(out[: 3 * WINDOW].double(), dense(step)[0], rtol=2e-5, atol=2e-5)
        buffers.lens[:3] = 1
        buffers.slots.zero_()
        backend.init_forward_metadata_out_graph(batch_of(4, 0))  # an idle rank beside busy ones
        assert attended(backend, runner, captured, q, new).isfinite().all()


def test_more_rows_than_requests():
    """S-6: a pool of eight, and steps padded to a multiple of the three ranks that share them."""
    step = build(*(((20, 1),) * 7))
    held = hold(step)
    with stubbed(attn_tp_size=3) as module:
        runner = runner_of(step, held)
        backend = module.PagedMlaBackend(runner)
        ids, slots = padded([held.request_ids, held.out_cache_loc], 2)
        batch = SimpleNamespace(
            forward_mode=Mode("decode"),
            batch_size=9,
            req_pool_indices=ids,
            seq_lens=torch.cat([step.seq_lens.long(), torch.ones(2).long()]),
            out_cache_loc=slots,
        )
        backend.init_forward_metadata(batch)
        q, new = (
            padded(tensors, 2) for tensors in ([step.q_nope, step.q_pe], [held.latents, held.keys])
        )
        out = attended(backend, runner, batch, q, new)
        torch.testing.assert_close(out[:7].double(), dense(step)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("backend", "sizes", "tokens"),
    [
        ("breakable", [16, 100], 100 + 8),
        ("breakable", [16], 32 + 8),
        ("disabled", [100], 32 + 8),
        ("disabled", None, 32 + 8),
    ],
    ids=["larger", "smaller", "none", "none-without-sizes"],
)
def test_graphs_of_prompts_are_captured_at_their_size(backend, sizes, tokens):
    step = build((20, 1))
    prefill = SimpleNamespace(backend=backend, bs=sizes)
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    with stubbed(graph=graph) as module:
        made = module.PagedMlaBackend(runner_of(step, hold(step)))
        assert made.rows.config.max_query_tokens == tokens


def test_a_chunk_that_has_grown():
    """With dynamic chunking in pipelines a chunk may exceed the option, up to a step's tokens."""
    step = build((60, 50))
    held = hold(step)
    with stubbed(enable_dynamic_chunking=True, pp_size=2) as module:
        runner = runner_of(step, held)
        backend = module.PagedMlaBackend(runner)
        batch = SimpleNamespace(
            forward_mode=Mode("extend"),
            batch_size=1,
            req_pool_indices=held.request_ids,
            seq_lens=step.seq_lens.long(),
            extend_seq_lens=torch.tensor([50]).int(),
            positions=torch.zeros(50),
            out_cache_loc=held.out_cache_loc,
        )
        backend.init_forward_metadata(batch)
        q, new = (step.q_nope, step.q_pe), (held.latents, held.keys)
        out = attended(backend, runner, batch, q, new)
        torch.testing.assert_close(out.double(), dense(step)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("mode", ["verify", "draft-extend"])
def test_a_step_that_is_padded_after_it_was_planned(mode):
    """S-6: ranks of data parallelism have as many tokens as the busiest of them."""
    step = build((36, WINDOW), (20, WINDOW))
    held = hold(step)
    with stubbed(speculative_num_draft_tokens=WINDOW, speculative_eagle_topk=1) as module:
        runner = runner_of(step, held, is_draft_worker=mode == "draft-extend")
        backend = module.PagedMlaBackend(runner)
        cached = step.seq_lens - WINDOW if mode == "verify" else step.seq_lens
        batch = SimpleNamespace(
            forward_mode=Mode(mode),
            batch_size=2,
            req_pool_indices=held.request_ids,
            seq_lens=cached.long(),
            out_cache_loc=held.out_cache_loc,
            extend_seq_lens_cpu=[WINDOW] * 2,
            spec_info=SimpleNamespace(draft_token_num=WINDOW, custom_mask=None),
        )
        backend.init_forward_metadata(batch)
        [batch.out_cache_loc] = padded([batch.out_cache_loc], 3)
        before = held.pool[0].clone()
        out = attended(
            backend,
            runner,
            batch,
            padded([step.q_nope, step.q_pe], 3),
            padded([held.latents, held.keys], 3),
        )
        torch.testing.assert_close(out[: 2 * WINDOW].double(), dense(step)[0], rtol=2e-5, atol=2e-5)
        assert not out[2 * WINDOW :].any()
        assert torch.equal(held.pool[0], before)


@pytest.mark.parametrize("rows", [1, 3], ids=["rows-as-before", "rows-padded"])
def test_a_window_is_as_long_as_it_was_before_its_step_was_padded(rows):
    """S-16: each layer of drafts plans the step that the layer before it left, slots padded."""
    step = build((36, WINDOW))
    held = hold(step)
    padding = 2 * WINDOW + 3
    with stubbed(speculative_num_draft_tokens=WINDOW) as module:
        runner = runner_of(step, held, is_draft_worker=True)
        backend = module.PagedMlaBackend(runner)
        [slots] = padded([held.out_cache_loc], padding)
        batch = SimpleNamespace(
            forward_mode=Mode("draft-extend"),
            batch_size=rows,
            req_pool_indices=torch.cat([held.request_ids, torch.zeros(2).long()]),
            seq_lens=torch.cat([step.seq_lens.long(), torch.ones(2).long()]),
            out_cache_loc=slots,
            extend_seq_lens_cpu=[WINDOW],
            spec_info=None,
        )
        backend.init_forward_metadata(batch)
        out = attended(
            backend,
            runner,
            batch,
            padded([step.q_nope, step.q_pe], padding),
            padded([held.latents, held.keys], padding),
        )
        torch.testing.assert_close(out[:WINDOW].double(), dense(step)[0], rtol=2e-5, atol=2e-5)
        assert out.isfinite().all()


@pytest.mark.parametrize(
    ("counted", "padding", "handed_on"),
    [
        ({"num_token_non_padded_cpu": 7}, 1, 8),
        ({"global_num_token_non_padded_cpu": 7}, 1, 7),
        ({"num_token_non_padded_cpu": None}, 0, 7),
        ({"global_num_token_non_padded_cpu": 0}, 0, 7),
    ],
    ids=["0.5.17", "0.5.23", "half-of-a-batch", "idle-rank"],
)
def test_prompts_that_are_padded_before_they_are_planned(counted, padding, handed_on):
    """S-6: layers hand on every line in 0.5.17, and in 0.5.23 what is no padding."""
    step = build((36, 4), (20, 3))
    held = hold(step)
    with stubbed() as module:
        runner = runner_of(step, held)
        backend = module.PagedMlaBackend(runner)
        [slots] = padded([held.out_cache_loc], padding)
        batch = SimpleNamespace(
            forward_mode=Mode("extend"),
            batch_size=2,
            req_pool_indices=held.request_ids,
            seq_lens=step.seq_lens.long(),
            extend_seq_lens=torch.tensor([4, 3]).int(),
            positions=torch.zeros(7 + padding),
            out_cache_loc=slots,
            **counted,
        )
        backend.init_forward_metadata(batch)
        batch.out_cache_loc = slots[:handed_on]
        q, new = (
            [tensor[:handed_on] for tensor in padded(tensors, padding)]
            for tensors in ([step.q_nope, step.q_pe], [held.latents, held.keys])
        )
        out = attended(backend, runner, batch, q, new)
        torch.testing.assert_close(out[:7].double(), dense(step)[0], rtol=2e-5, atol=2e-5)
        assert not out[7:].any()


def test_a_row_that_is_made_up_for_an_idle_rank():
    """S-6: as long as the step of the busiest rank, which may be longer than any request."""
    step = build((128, 1), max_model_len=128)
    held = hold(step)
    with stubbed(chunked_prefill_size=160, max_prefill_tokens=160) as module:
        runner = runner_of(step, held)
        runner.req_to_token_pool.req_to_token[1] = held.out_cache_loc  # NaN
        backend = module.PagedMlaBackend(runner)
        batch = SimpleNamespace(
            forward_mode=Mode("decode"),
            batch_size=2,
            req_pool_indices=torch.tensor([0, 1]),
            seq_lens=torch.tensor([1, 128]),
        )
        backend.init_forward_metadata(batch)  # behind a row's table lies that of the next
        batch = SimpleNamespace(
            forward_mode=Mode("extend"),
            batch_size=1,
            req_pool_indices=torch.zeros(1).long(),
            seq_lens=torch.tensor([144]),
            extend_seq_lens=torch.tensor([144]).int(),
            positions=torch.zeros(144),
            out_cache_loc=torch.zeros(144).long(),
        )
        backend.init_forward_metadata(batch)
        q, new = (
            [tensor[:1].expand(144, *tensor.shape[1:]).contiguous() for tensor in tensors]
            for tensors in ([step.q_nope, step.q_pe], [held.latents, held.keys])
        )
        assert attended(backend, runner, batch, q, new).isfinite().all()
        assert not held.pool[0].any()


def test_a_mask_that_moves_is_not_planned_inside_a_graph(monkeypatch):
    """S-17: n-grams have a new one in every step; SGLang plans without a graph where this fails."""
    step = build((36, WINDOW), (20, WINDOW))
    held = hold(step)
    with stubbed(speculative_num_draft_tokens=WINDOW) as module:
        ngram = SimpleNamespace(is_ngram=lambda: True)
        backend = module.PagedMlaBackend(runner_of(step, held, spec_algorithm=ngram))
        spec = SimpleNamespace(draft_token_num=WINDOW)
        batch = SimpleNamespace(
            forward_mode=Mode("verify"),
            batch_size=2,
            req_pool_indices=held.request_ids,
            seq_lens=step.seq_lens.long() - WINDOW,
            spec_info=spec,
        )
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        spec.custom_mask = backend.verify_mask.buffer
        backend.init_forward_metadata_out_graph(batch)
        spec.custom_mask = SimpleNamespace(data_ptr=lambda: 0, is_cuda=True)
        with pytest.raises(Unsupported, match="mask"):
            backend.init_forward_metadata_out_graph(batch)


def test_rows_that_verify_different_numbers_of_drafts_are_refused():
    """S-2: the batch has the largest number of drafts of a row, its layout the actual numbers."""
    step = build((36, 4), (20, 2))
    held = hold(step)
    with stubbed(speculative_num_draft_tokens=4, speculative_eagle_topk=1) as module:
        backend = module.PagedMlaBackend(runner_of(step, held))
        batch = SimpleNamespace(
            forward_mode=Mode("verify"),
            batch_size=2,
            req_pool_indices=held.request_ids,
            seq_lens=torch.tensor([32, 18]),
            spec_info=SimpleNamespace(
                draft_token_num=4, custom_mask=None, ragged_verify_layout=torch.tensor([4, 2])
            ),
        )
        with pytest.raises(Unsupported, match="SGLANG_RAGGED_VERIFY_MODE"):
            backend.init_forward_metadata(batch)


ALIKE = {"is_fp8": False, "takes_parts": True}


def teach_both(module, is_first, **need):
    """Register a model that needs something and one that does not, in either order."""
    needs = [ALIKE | need, ALIKE]
    for each in needs if is_first else needs[::-1]:
        module.teach("ours", **each)


@pytest.mark.parametrize("is_first", [True, False], ids=["target", "draft"])
def test_codes_with_a_scale_and_a_model_without_codes(is_first):
    """S-11: a target and its draft have one name; the last registration does not win."""
    with stubbed_dispatch() as module:
        teach_both(module, is_first, is_fp8=True)
        handle = module.AttentionBackendRegistry.get_handler("ours")
        for scale, way in ((0.5, "MLA"), (1.0, "MHA"), (None, "MHA")):
            attn = SimpleNamespace(attn_mqa=SimpleNamespace(k_scale_float=scale))
            assert handle(attn, None) == way


@pytest.mark.parametrize("is_first", [True, False], ids=["target", "draft"])
def test_scaled_queries_and_a_model_without_them(is_first):
    """SGLang scales only joined queries."""
    with stubbed_dispatch() as module:
        teach_both(module, is_first, takes_parts=False)
        assert module.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS == ["fa3"]


def test_queries_in_parts():
    with stubbed_dispatch() as module:
        for _ in range(2):  # of a target and its draft
            module.teach("ours", **ALIKE)
        assert module.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS == ["fa3", "ours"]


REFUSED = {
    "no MLA": ("a model without MLA", {"use_mla_backend": False}, {}),
    "draft without MLA": (
        'speculative_draft_attention_backend="triton"',
        {"use_mla_backend": False, "is_draft_worker": True},
        {},
    ),
    "hybrid": ("hybrid", {"model_config": SimpleNamespace(linear_attention="kda")}, {}),
    "decode-context": ("decode context", {}, {"dcp_enabled": True}),
    "overlapping-trees": (
        "two-batch overlap",
        {},
        {
            "speculative_eagle_topk": 2,
            "speculative_num_draft_tokens": 4,
            "two_batch_overlap": True,
        },
    ),
    "prefill-context": ("prefill context", {}, {"attn_cp_size": 2}),
    "two-writers": (
        "k_scale",
        {
            "k_scale": 0.5,
            "kv_cache_dtype": torch.float8_e4m3fn,
            "prefill_attention_backend_str": "fa3",
        },
        {},
    ),
}


@pytest.mark.parametrize(("reason", "changes", "context"), REFUSED.values(), ids=REFUSED)
def test_errors_at_the_creation_of_the_backend(reason, changes, context):
    """Bad input: before anything runs."""
    step = build((20, 1))
    with (
        stubbed(**context) as module,
        pytest.raises(Unsupported, match=reason),
    ):
        module.PagedMlaBackend(runner_of(step, hold(step), **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"k_scale": 0.5, "kv_cache_dtype": torch.float8_e4m3fn},
        {"kv_cache_dtype": torch.float8_e4m3fn, "prefill_attention_backend_str": "fa3"},
    ],
    ids=["plain", "scaled", "beside-another"],
)
def test_supported_scales_and_backends(changes):
    """S-11: scales where every writer knows them, and another writer where there are none."""
    step = build((20, 1))
    with stubbed() as module:
        module.PagedMlaBackend(runner_of(step, hold(step), **changes))
