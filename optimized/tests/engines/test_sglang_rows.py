"""Rows as SGLang hands them over, against dense attention.

S-1, S-6, S-10, S-11, S-14, S-17, S-20.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from fp8_step import values
from mla_step import build, config, dense, join
from prefill_step import assert_close as assert_prefill_close
from prefill_step import build as build_prefill
from sglang_step import hold

from paged_mla_optimized.engines.sglang.prompts import Prompts
from paged_mla_optimized.engines.sglang.rows import Rows
from paged_mla_shared.errors import InvalidArgument


def attended(rows, step, held, q=None):
    """Call `rows` as a layer does, and return the outputs."""
    q = (step.q_nope, step.q_pe) if q is None else q
    return rows.attend(q, held.new, held.pool, None)


def assert_outputs(out, step, visible=None):
    expected, _ = dense(step, visible)
    torch.testing.assert_close(out.double(), expected, rtol=2e-5, atol=2e-5)


def test_decode_then_a_smaller_replay():
    """S-17: rows that pad have length 1, line 0 and slot 0, which stays as it was."""
    step = build((37, 1), (16, 1), (1, 1))
    held = hold(step)
    rows = Rows(step.config, "cpu", held.req_to_token)
    rows.plan(held.request_ids, step.seq_lens.long(), 1)
    assert_outputs(attended(rows, step, held), step)
    again = hold(step)
    ids, lens = torch.tensor([2, 0, 0]), torch.tensor([37, 1, 1])
    again.out_cache_loc[1:] = 0
    rows.plan(ids, lens, 1)
    joined = torch.cat([step.q_nope, step.q_pe], dim=-1)
    out = attended(rows, step, again, joined)
    torch.testing.assert_close(out[0].double(), dense(step)[0][0], rtol=2e-5, atol=2e-5)
    assert out.isfinite().all()
    assert torch.equal(again.pool[0], torch.zeros_like(again.pool[0]))


def test_prompts_with_decode_rows_and_padding():
    step = build((40, 20), (17, 1), (33, 2), padded_tokens=3)
    held = hold(step)
    padding = torch.zeros(3, dtype=torch.int64)
    latents, keys, where = (
        torch.cat([held.latents, held.latents[:3]]),
        torch.cat([held.keys, held.keys[:3]]),
        torch.cat([held.out_cache_loc, padding]),
    )
    rows = Rows(step.config, "cpu", held.req_to_token)
    lens = torch.tensor([20, 1, 2], dtype=torch.int32)
    rows.plan_extend(held.request_ids, step.seq_lens.long(), lens, len(step.q_nope))
    out = rows.attend((step.q_nope, step.q_pe), (latents, keys, where), held.pool, None)
    assert_outputs(out, step)
    assert torch.equal(held.pool[0], torch.zeros_like(held.pool[0]))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["fast", "invariant"])
@pytest.mark.parametrize("mates", [(1, 1), (40, 9)], ids=["decode", "prompts"])
def test_bits_do_not_depend_on_other_rows(mates, batch_invariant):
    """S-20: the same in every step of a kind, or only close: a prompt's rest of one token too."""
    step = build((230, 1), num_heads=16, batch_invariant=batch_invariant)
    together = join(step, build((250, mates[0]), (40, mates[1]), num_heads=16, seed=1))
    found = []
    for one in (step, together):
        held = hold(one)
        rows = Rows(step.config, "cpu", held.req_to_token)
        if mates == (1, 1):
            rows.plan(held.request_ids, one.seq_lens, 1)
        else:
            lens = one.cu_seqlens_q.diff()
            rows.plan_extend(held.request_ids, one.seq_lens, lens, len(one.q_nope))
        found.append(attended(rows, one, held)[:1])
        assert_outputs(found[-1], step)
    assert torch.equal(*found) == batch_invariant


def test_trees_and_chains_of_drafts():
    """S-14: two trees of four nodes; then the same rows as windows of a chain."""
    step = build((36, 4), (20, 4))
    held = hold(step)
    trees = torch.tensor(
        [
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]],
            [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]],
        ]
    ).bool()
    rows = Rows(step.config, "cpu", held.req_to_token, tree_len=4)
    rows.plan(held.request_ids, step.seq_lens.long(), 4, trees.flatten())
    visible = [
        torch.cat([torch.ones(4, seq_len - 4, dtype=torch.bool), tree], dim=1)
        for (seq_len, _), tree in zip(step.rows, trees, strict=True)
    ]
    assert_outputs(attended(rows, step, held), step, visible)
    rows.plan(held.request_ids, step.seq_lens.long(), 4)
    assert_outputs(attended(rows, step, held), step)


def test_a_tree_where_drafts_are_chains_is_refused():
    step = build((20, 4))
    held = hold(step)
    rows = Rows(step.config, "cpu", held.req_to_token)
    with pytest.raises(RuntimeError, match="drafts are chains"):
        rows.plan(held.request_ids, step.seq_lens, 4, torch.ones(16, dtype=torch.bool))


def test_more_rows_than_a_server_has_are_refused():
    """Bad input: a warm-up of SGLang may have more rows than the pool has requests."""
    step = build((20, 1))
    rows = Rows(step.config, "cpu", hold(step).req_to_token)
    most = step.config.max_rows
    ids, lens = torch.zeros(most + 1).long(), torch.ones(most + 1).long()
    with pytest.raises(InvalidArgument, match=f"{most + 1} rows; allowed: at most max_rows"):
        rows.plan(ids, lens, 1)


def test_codes_times_the_layers_scale():
    """S-11: divided as they are written, multiplied as they are read."""
    scale = torch.tensor(0.02)
    step = build((40, 1), (17, 1))
    held = hold(step)
    codes = (held.pool / scale).to(torch.float8_e4m3fn)
    exact = hold(step).pool
    for row, (seq_len, _) in enumerate(step.rows):
        exact[held.req_to_token[2 + row, :seq_len].long(), 0] = step.keys[row]
    stored = values((exact / scale).to(torch.float8_e4m3fn).view(torch.uint8)).float() * scale
    found = [
        stored[held.req_to_token[2 + row, :seq_len].long(), 0]
        for row, (seq_len, _) in enumerate(step.rows)
    ]
    rows = Rows(config(cache_format="fp8_e4m3"), "cpu", held.req_to_token)
    rows.plan(held.request_ids, step.seq_lens, 1)
    out = rows.attend((step.q_nope, step.q_pe), held.new, codes, scale)
    assert_outputs(out, replace(step, keys=found))


def test_prompts_over_heads():
    """S-21: new tokens alone, after what is cached, and to a chunk of it that one row lacks."""
    alone = build_prefill((7, 7), (20, 20))
    whole = build_prefill((12, 7), (20, 20))
    chunk = build_prefill((33, 7), (0, 20), causal=False)
    prompts = Prompts(alone.config)
    prompts.begin(torch.tensor([7, 20]).int(), torch.tensor([12, 20]))
    sums = torch.tensor([[0, 9, 9], [0, 33, 33]]).int()
    for _ in range(2):  # layers
        for step, part, with_prefix in (
            (alone, None, False),
            (whole, None, True),
            (chunk, (1, sums), False),
        ):
            k_pe = step.k_pe[:, None].expand(-1, step.config.num_heads, -1)
            out, lse = prompts.attend(
                torch.cat([step.q_nope, step.q_pe], dim=-1),
                torch.cat([step.k_nope, k_pe], dim=-1),
                step.v,
                chunk=part,
                with_prefix=with_prefix,
            )
            assert lse.is_contiguous()
            assert_prefill_close((out, lse), step)
