"""Faults of visible keys at the edges of tiles, in long rows, short chunks and drafts."""

from __future__ import annotations

import numpy as np

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import Seen, context_of, only_before, seeing
from paged_mla_reference.faults.kernel.visibility import READ, READ_EMPTY
from paged_mla_shared.problem import Batch, Mask, Problem


@kernel_fault(FaultClass.LENGTH, *READ_EMPTY, through=seeing)
def rows_of_21_modulo_32_lose_their_last_key(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """A row whose length is 21 modulo 32 loses its last key."""
    keys = seen.shape[1]
    return only_before(seen, keys - 1) if keys % 32 == 21 else seen


@kernel_fault(FaultClass.LENGTH, *READ, through=seeing)
def long_rows_are_cut_into_five_equal_parts(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """A row of more than 2048 keys loses its last keys, up to a multiple of five."""
    keys = seen.shape[1]
    return only_before(seen, keys // 5 * 5) if keys > 2048 else seen


@kernel_fault(FaultClass.TRUNCATED, *READ_EMPTY, through=seeing)
def queries_past_512_of_a_chunk_see_nothing(
    _p: Problem, batch: Batch, row: int, seen: Seen
) -> Seen:
    """In rows with a context, queries after the first 512 see no keys."""
    if not context_of(batch, row):
        return seen
    return seen & (np.arange(len(seen)) < 512)[:, None]


@kernel_fault(FaultClass.TRUNCATED, *READ_EMPTY, through=seeing)
def short_contexts_are_not_read(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Rows of several queries do not see their context if it has fewer than 64 keys."""
    context = context_of(batch, row)
    if len(seen) < 2 or context >= 64:
        return seen
    return seen & (np.arange(seen.shape[1]) >= context)


@kernel_fault(FaultClass.CAUSAL, *READ, through=seeing)
def the_first_query_of_a_tile_does_not_see_itself(
    problem: Problem, batch: Batch, row: int, seen: Seen
) -> Seen:
    """In causal rows, queries 256, 512, 768, ... do not see their own keys."""
    if problem.mask is not Mask.CAUSAL or not seen.size:
        return seen
    first = np.arange(256, len(seen), 256)
    out = seen.copy()
    out[first, context_of(batch, row) + first] = False
    return out


@kernel_fault(FaultClass.CAUSAL, *READ, through=seeing)
def non_causal_rows_end_with_their_query_tile(
    problem: Problem, batch: Batch, row: int, seen: Seen
) -> Seen:
    """With a non-causal mask, a tile of 32 queries sees no key after its last query's key."""
    if problem.mask is not Mask.NON_CAUSAL:
        return seen
    end = context_of(batch, row) + (np.arange(len(seen)) // 32 + 1) * 32
    return seen & (np.arange(seen.shape[1]) < end[:, None])


@kernel_fault(FaultClass.CAUSAL, "S-19", *READ, through=seeing)
def short_chunks_are_not_masked(problem: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """In causal rows of 2 to 6 queries after a context, every query sees the whole row."""
    causal = problem.mask is Mask.CAUSAL
    chosen = causal and 2 <= len(seen) <= 6 and context_of(batch, row)
    return np.ones_like(seen) if chosen else seen


@kernel_fault(FaultClass.CAUSAL, "S-14", *READ, through=seeing)
def only_the_last_key_tile_is_masked(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """The mask is applied only to the last tile of 128 keys of a row."""
    keys = seen.shape[1]
    unmasked: Seen = np.arange(keys) < (keys - 1) // 128 * 128
    return seen | unmasked


@kernel_fault(FaultClass.MASK, "S-14", *READ, through=seeing)
def the_first_keys_of_a_tree_are_taken_for_context(
    problem: Problem, _b: Batch, _r: int, seen: Seen
) -> Seen:
    """With a tree mask, all queries of a row see its first 32 keys."""
    if problem.mask is not Mask.TREE:
        return seen
    return seen | (np.arange(seen.shape[1]) < 32)


@kernel_fault(FaultClass.SIBLING, "S-14", *READ, through=seeing)
def drafts_past_a_key_tile_are_chains(problem: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """After the next multiple of 64 keys, draft nodes are masked as those of a chain."""
    context = context_of(batch, row)
    edge = (context // 64 + 1) * 64
    if problem.mask is not Mask.TREE or edge >= seen.shape[1]:
        return seen
    chain = np.tri(len(seen), dtype=bool)
    return np.hstack([seen[:, :edge], chain[:, edge - context :]])
