"""Decode rows as vLLM hands them over, against dense attention. S-2, S-6, S-17, S-18, S-20."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from ci.installed import import_or_skip
from fp8_step import values
from mla_step import P, R, assert_close, build, config, dense, join

from paged_mla_optimized.engines.vllm import decode as vllm_decode
from paged_mla_optimized.engines.vllm.decode import Decode, FixedLengths, Step
from paged_mla_shared.problem import Output

LAYERS = 3
K_SCALE = torch.tensor(1.0)


def described(decode, step):
    """Describe a step as vLLM does, with a table as wide as its longest row may need."""
    table = torch.zeros(len(step.rows), 16, dtype=torch.int32)
    width = step.block_table.shape[1] - 1  # without the tail that nothing may read
    table[:, :width] = step.block_table[:, :width]
    for row, (seq_len, _) in enumerate(step.rows):
        table[row, -(-seq_len // step.config.block_size) :] = 0
    return Step(decode, step.cu_seqlens_q, step.seq_lens, table, len(step.q_nope))


def attend(step, decode, q, latents, k_scale=K_SCALE):
    """Attend in a step's only layer."""
    return described(decode, step).attend("layer", q, latents, k_scale)


def as_queries(step):
    """Return queries as the layer leaves them: the first transposed, the second a slice."""
    heads_first = step.q_nope.transpose(0, 1).contiguous()
    whole = torch.cat([torch.full_like(step.q_nope, torch.nan), step.q_pe], dim=-1)
    return heads_first.transpose(0, 1), whole[..., R:]


def of_layers(cache):
    """Return a layer of a cache whose blocks span all layers."""
    layers = torch.full((len(cache), LAYERS, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
    layers[:, 1] = cache
    return layers[:, 1]


def test_a_padded_graph_of_rows_with_drafts():
    """S-17: two rows of three tokens and one of two; a row and four tokens only pad."""
    step = build((37, 3), (3, 3), (64, 2), (0, 0), padded_tokens=4)
    decode = Decode(step.config, "cpu", (1, 3))
    got = attend(step, decode, as_queries(step), of_layers(step.cache))
    assert_close(got, dense(step))


def test_the_first_layer_plans():
    """Once for all layers of a forward, and again for the next, whose lengths may have changed."""
    long = build((40, 1), (17, 1))
    decode, lens = Decode(long.config, "cpu", (1,)), long.seq_lens.clone()
    step = described(decode, long)
    step.seq_lens = lens
    for rows in ([(40, 1), (17, 1)], [(33, 1), (16, 1)]):
        lens.copy_(torch.tensor([seq_len for seq_len, _ in rows]))
        keys = [keys[:seq_len] for keys, (seq_len, _) in zip(long.keys, rows, strict=True)]
        expected = dense(replace(long, rows=rows, keys=keys))
        with patch.object(decode.mla, "plan", wraps=decode.mla.plan) as plan:
            for layer in ("one", "two", "three"):
                got = step.attend(layer, as_queries(long), long.cache, K_SCALE)
                assert_close(got, expected)
        assert plan.call_count == 1


class Forward:
    """What vLLM's forward context is to a step."""


def test_a_draft_captures_the_inputs_of_its_target():
    """S-17: steps of two graphs, target first; then a draft's layer in forwards of its own."""
    steps = build((40, 2), (17, 2)), build((33, 2))
    decode = Decode(steps[0].config, "cpu", (1, 2))
    given = [described(decode, step) for step in steps]
    for draft in (False, True):
        for step, one in zip(steps, given, strict=True):
            forward = Forward()
            with patch.object(decode.mla, "plan", wraps=decode.mla.plan) as plan:
                for layer in ["draft"] if draft else ["first", "second"]:
                    got = one.attend(layer, as_queries(step), step.cache, K_SCALE, forward)
                    assert_close(got, dense(step))
            assert plan.call_count == 1


def test_another_step_inside_a_forward_is_refused():
    """Micro-batches that took turns on one builder would attend by each other's lengths."""
    step = build((5, 1))
    decode, forward = Decode(step.config, "cpu", (1,)), Forward()
    one, other = described(decode, step), described(decode, step)
    one.attend("first", as_queries(step), step.cache, K_SCALE, forward)
    other.attend("first", as_queries(step), step.cache, K_SCALE, Forward())
    with pytest.raises(RuntimeError, match="another step was planned"):
        one.attend("second", as_queries(step), step.cache, K_SCALE, forward)


def test_lengths_of_microbatches_keep_their_place():
    """S-17: what a graph captured reads the lengths of its replays, whose tensors are new."""
    captured, replayed = build((3, 1), (3, 1)), build((37, 1), (16, 1), seed=1)
    decode, fixed = Decode(captured.config, "cpu", (1,)), FixedLengths(2, "cpu")
    starts, lens = fixed.hold(captured.cu_seqlens_q, captured.seq_lens)
    step = replace(described(decode, replayed), query_start_loc=starts, seq_lens=lens)
    fixed.hold(replayed.cu_seqlens_q.clone(), replayed.seq_lens.clone())
    got = step.attend("layer", as_queries(replayed), replayed.cache, K_SCALE)
    assert_close(got, dense(replayed))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
def test_bits_do_not_depend_on_other_rows(batch_invariant):
    """S-20: outputs are bit-equal in steps of any query lengths, or only close without the mode.

    Together with a row with drafts, or in a padded graph, another kernel would be selected.
    """
    step = build((200, 1), num_heads=8, batch_invariant=batch_invariant)
    mates = build((230, 3), (40, 3), num_heads=8, padded_tokens=2, seed=1)
    decode = Decode(step.config, "cpu", (1, 2, 3))
    alone = attend(step, decode, as_queries(step), step.cache)
    together = join(step, mates)
    among = attend(together, decode, as_queries(together), together.cache)
    assert_close([part[:1] for part in among], alone)
    same = [torch.equal(one, other[:1]) for one, other in zip(alone, among, strict=True)]
    assert all(same) == batch_invariant


def test_a_step_between_two_layers_of_another_is_refused():
    """Later layers would attend by the lengths of another step; from the first on all is well."""
    step = build((5, 1))
    decode = Decode(step.config, "cpu", (1,))
    one, other = described(decode, step), described(decode, step)
    for described_step in (one, other):
        described_step.attend("first", as_queries(step), step.cache, K_SCALE)
    with pytest.raises(RuntimeError, match="another step was planned between two layers"):
        one.attend("second", as_queries(step), step.cache, K_SCALE)
    for layer in ("first", "second"):
        assert_close(one.attend(layer, as_queries(step), step.cache, K_SCALE), dense(step))


def test_codes_times_the_layers_scale():
    """S-11: a flat cache of codes, as vLLM views it, and the scale that it has of its layer."""
    scale = 0.02
    plain = build((40, 1), (17, 1))
    codes = (plain.cache / scale).to(torch.float8_e4m3fn)
    stored = values(codes.view(torch.uint8)).float() * scale
    found = []
    for row, (seq_len, _) in enumerate(plain.rows):
        token = torch.arange(seq_len)
        found.append(stored[plain.block_table[row, token // 16], token % 16])
    step = replace(plain, keys=found)
    decode = Decode(config(cache_format="fp8_e4m3"), "cpu", (1,))
    k_scale = torch.tensor([scale])
    got = attend(step, decode, as_queries(step), of_layers_of_codes(codes), k_scale)
    assert_close(got, dense(step))


def of_layers_of_codes(codes):
    """Return :func:`of_layers` of codes: 0x7f is NaN."""
    layers = torch.full((len(codes), LAYERS, *codes.shape[1:]), 0x7F, dtype=torch.uint8)
    layers[:, 1] = codes.view(torch.uint8)
    return layers[:, 1].view(torch.float8_e4m3fn)


def test_ranks_of_context_parallelism():
    """S-18: heads of both ranks, joined queries, lengths of each rank; one has no key of a row.

    The reference divides the keys and merges the partial results.
    """
    parallel = import_or_skip("paged_mla_reference.rules.parallel")
    oracle = import_or_skip("paged_mla_reference.rules.merge")
    whole = build((50, 1), (1, 1), (33, 1), (0, 0), padded_tokens=1, seed=2)
    group = parallel.ContextParallel(2)
    partials = []
    for rank in range(group.world):
        lens = [group.local_len(seq_len, rank) for seq_len, _ in whole.rows]
        rows = [(n, q) for n, (_, q) in zip(lens, whole.rows, strict=True)]
        step = build(*rows, padded_tokens=1, seed=2)
        for row, (seq_len, _) in enumerate(whole.rows):
            token = torch.arange(lens[row])
            mine = whole.keys[row][group.local_positions(seq_len, rank)]
            step.cache[step.block_table[row, token // 16], token % 16] = mine
        joined = torch.cat([whole.q_nope, whole.q_pe], dim=-1)
        assert joined.shape[-1] == R + P
        decode = Decode(step.config, "cpu", (1,))
        out, lse = attend(step, decode, joined, step.cache)
        assert lse.dtype == torch.float32
        partials.append(Output(out.numpy(), lse.numpy()))
    assert np.isneginf(partials[1].lse[1]).all()  # the row of one key lies on rank 0
    merged = oracle.merge(partials)
    assert_close((torch.from_numpy(merged.out), torch.from_numpy(merged.lse)), dense(whole))


def test_kernels_compile_before_the_first_step_that_no_graph_captures():
    """Once; from then on a step of another length finds its kernel."""
    step = build((40, 1), (17, 1))
    decode = Decode(step.config, "cpu", (1, 3))
    with patch.object(decode.mla, "warm_up", wraps=decode.mla.warm_up) as warm_up:
        for is_capturing, calls in ((True, 0), (False, 1), (False, 1)):
            with patch.object(vllm_decode, "is_capturing", return_value=is_capturing):
                got = attend(step, decode, as_queries(step), step.cache)
            assert warm_up.call_count == calls
            assert_close(got, dense(step))
