"""Ranks of context parallelism in processes of their own, each held against attention to the whole.

The processes import this module and not the tests, which would cost more than what they do.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mla_step import P, R, Step, assert_close, build, dense

from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.tensors.step import MlaStep

BLOCK_SIZE = 16  # of a rank
_PATIENCE = timedelta(seconds=60)


class Situation(NamedTuple):
    """Steps of one group, the later ones through the same instance."""

    name: str
    world: int
    interleave: int
    steps: tuple[tuple[tuple[int, int], ...], ...]  # of rows (seq_len, query_len)
    padded_tokens: int = 1
    config: dict[str, Any] = {}  # noqa: RUF012 - read only


SITUATIONS = (
    Situation(
        "decode and idle, 2 ranks, heads 3 and 2",
        world=2,
        interleave=1,
        steps=(((50, 1), (1, 1), (33, 1), (0, 0)), ((2, 1), (34, 1)), ()),
    ),
    Situation(
        "chain, chunk and decode, 3 ranks, heads 2, 2 and 1",
        world=3,
        interleave=4,
        steps=(((55, 4), (2, 2), (0, 0), (23, 9), (13, 1)),),
        config={"lse_base": "2"},
    ),
)


def config_of(situation: Situation) -> dict[str, Any]:
    """Return what differs from the small config of ``mla_step.py``; blocks are the group's."""
    block_size = BLOCK_SIZE * situation.world
    return {"num_heads": 5, "block_size": block_size, "max_query_tokens": 20} | situation.config


def run(rank: int, store: str, world: int) -> None:
    """Run every situation that this rank is in."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=_PATIENCE
    )
    for situation in SITUATIONS:
        group = dist.new_group(list(range(situation.world)))  # by all ranks, members or not
        if rank < situation.world:
            try:
                _hold(situation, rank, group)
            except Exception as error:
                error.add_note(f"{situation.name}: rank {rank}")
                raise
    dist.barrier()
    dist.destroy_process_group()


def _hold(situation: Situation, rank: int, group: dist.ProcessGroup) -> None:
    """Append and attend as one rank; its outputs equal those of attention to whole rows."""
    mla = None
    for number, rows in enumerate(situation.steps):
        padded = situation.padded_tokens if rows else 0
        step = build(*rows, padded_tokens=padded, seed=number, **config_of(situation))
        config = replace(step.config, block_size=BLOCK_SIZE)
        if mla is None:
            mla = ContextParallelMla(config, group, "cpu", interleave=situation.interleave)
        cache, expected_cache, new = _caches(step, situation, rank)
        if number == 0:
            mla.warm_up(cache)
        tokens = len(step.q_nope)
        mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=tokens))
        mla.append(new[:, :R], new[:, R:], cache)
        torch.testing.assert_close(cache, expected_cache, rtol=0, atol=0, equal_nan=True)
        heads = slice(mla.heads.start, mla.heads.stop)
        answer = mla.attend(step.q_nope[:, heads], step.q_pe[:, heads], cache)
        out, lse = dense(step)
        assert_close(answer, (out[:, heads], lse[:, heads] * config.lse_unit))


def _caches(step: Step, situation: Situation, rank: int) -> tuple[torch.Tensor, ...]:
    """Return a rank's cache before and after the step, NaN but for its tokens, and what is new."""
    shape = (len(step.cache), BLOCK_SIZE, R + P)
    before, after = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    new = torch.full((len(step.q_nope), R + P), torch.nan)
    for row, (seq_len, query_len) in enumerate(step.rows):
        position = torch.arange(seq_len)
        mine = position[position // situation.interleave % situation.world == rank]
        index = torch.arange(len(mine))
        block, offset = step.block_table[row, index // BLOCK_SIZE], index % BLOCK_SIZE
        after[block, offset] = step.keys[row][mine]
        cached = mine < seq_len - query_len
        before[block[cached], offset[cached]] = step.keys[row][mine[cached]]
        start = int(step.cu_seqlens_q[row])
        new[start : start + query_len] = step.keys[row][seq_len - query_len :]
    return before, after, new
