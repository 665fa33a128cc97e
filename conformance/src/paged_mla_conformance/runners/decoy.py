"""A second problem and a second step; a runner that uses their values is wrong (S-17)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paged_mla_reference.rules.masks import decode_mask, spell_mask
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.problem import Batch, Problem, Rope, RopePairing, cu_seqlens_of


def decoy_problem(problem: Problem, capabilities: Capabilities) -> Problem:
    """Return a problem with other scales and, if declared, a rotation; the same steps fit it."""
    ropes = sorted(capabilities.ropes)
    return replace(
        problem,
        softmax_scale=capabilities.softmax_scale or 2 * problem.softmax_scale,
        cache_scale=2 * problem.cache_scale,
        rope=Rope(RopePairing(ropes[0])) if ropes else None,
    )


def decoy_step(problem: Problem, batch: Batch) -> Batch:
    """Return a step of the same shape, with its rows in reverse order and in other blocks."""
    seq_lens, table = batch.seq_lens[::-1].copy(), batch.block_table[::-1]
    known = (table >= 0) & (table < problem.num_blocks)
    mask = batch.mask
    if mask is not None:
        matrices = decode_mask(problem, batch)[::-1]
        spelling, most = problem.mask_spelling, problem.max_draft_tokens
        mask = spell_mask(matrices, spelling, seq_lens, most, batch.num_tokens)
    return replace(
        batch,
        cu_seqlens_q=cu_seqlens_of(batch.query_lens[::-1]),
        seq_lens=seq_lens,
        block_table=np.where(known, problem.num_blocks - 1 - table, table),
        mask=mask,
        slot_mapping=None,
    )
