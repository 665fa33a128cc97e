"""Wrong rotation: pairings, positions, and the slots taken from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.deviations.change import posed, reading
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.paging import context_lens
from paged_mla_reference.rope import rotate
from paged_mla_reference.rounding import widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Problem, RopePairing

SCORED = ("S-3", "S-5", "S-7", "S-12")


def _rotating_further(oracle: Oracle, by: Callable[[Problem, Batch], NDArray[np.int64]]) -> Oracle:
    """Rotate queries `by` so many positions more, int64 [T]."""

    def turned(problem: Problem, batch: Batch) -> Batch:
        if problem.rope is None:
            return batch
        q_pe = rotate(widen(batch.q_pe), by(problem, batch), problem.rope)
        return replace(batch, q_pe=q_pe.astype(batch.q_pe.dtype))

    return reading(oracle, turned)


@breaks(Fault.ROPE, *SCORED, cites="sglang#25015")
def queries_are_rotated_one_late(oracle: Oracle) -> Oracle:
    """Queries are rotated at their position plus one."""
    return _rotating_further(oracle, lambda _, batch: np.ones(batch.num_tokens, np.int64))


@breaks(Fault.ROPE, *SCORED)
def siblings_are_rotated_by_index(oracle: Oracle) -> Oracle:
    """Queries of a tree are rotated at their index, not at their depth."""

    def beyond_depth(problem: Problem, batch: Batch) -> NDArray[np.int64]:
        by_index = RIGHT.metadata(replace(problem, mask=Mask.CAUSAL), batch).positions
        return by_index - RIGHT.metadata(problem, batch).positions

    return _rotating_further(oracle, beyond_depth)


@breaks(Fault.ROPE, *SCORED)
def queries_are_not_rotated(oracle: Oracle) -> Oracle:
    """Queries meet rotated keys as they came."""
    return posed(oracle, lambda p: replace(p, rope=None))


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, cites="sglang#30111 sglang#30342 xllm#853")
def pairing_is_always_interleaved(oracle: Oracle) -> Oracle:
    """NeoX pairing is ignored, in queries and in keys."""

    def interleaved(problem: Problem) -> Problem:
        if problem.rope is None:
            return problem
        return replace(problem, rope=replace(problem.rope, pairing=RopePairing.INTERLEAVED))

    both = posed(oracle, interleaved)
    return replace(both, append=lambda p, b, image: oracle.append(interleaved(p), b, image))


@breaks(Fault.ROPE, *SCORED, cites="sglang#30111")
def queries_take_the_other_pairing(oracle: Oracle) -> Oracle:
    """Queries are rotated with the pairing that keys do not have."""

    def other(problem: Problem) -> Problem:
        if problem.rope is None:
            return problem
        neox = problem.rope.pairing is RopePairing.NEOX
        pairing = RopePairing.INTERLEAVED if neox else RopePairing.NEOX
        return replace(problem, rope=replace(problem.rope, pairing=pairing))

    return posed(oracle, other)


@breaks(Fault.ROPE, "S-10", "S-12", *SCORED, cites="torchtitan#4117")
def yarn_is_ignored(oracle: Oracle) -> Oracle:
    """Frequencies are not interpolated, in queries and in keys."""

    def plain(problem: Problem) -> Problem:
        if problem.rope is None:
            return problem
        return replace(problem, rope=replace(problem.rope, yarn=None))

    both = posed(oracle, plain)
    return replace(both, append=lambda p, b, image: oracle.append(plain(p), b, image))


@breaks(Fault.ROPE, "S-10", "S-12", cites="sglang#22868")
def fused_rope_stores_rotated_columns_only(oracle: Oracle) -> Oracle:
    """With a rope inside the step, latents are not stored."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        ckv = batch.ckv if problem.rope is None else np.zeros_like(batch.ckv)
        return oracle.append(problem, replace(batch, ckv=ckv), image)

    return replace(oracle, append=append)


@breaks(Fault.ROPE, "S-10", "S-12")
def keys_are_rotated_twice(oracle: Oracle) -> Oracle:
    """Keys are rotated again when they are stored."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        if problem.rope is not None:
            positions = oracle.metadata(problem, batch).positions
            turned = rotate(widen(batch.k_pe), positions, problem.rope)
            batch = replace(batch, k_pe=turned.astype(batch.k_pe.dtype))
        return oracle.append(problem, batch, image)

    return replace(oracle, append=append)


def _placing(oracle: Oracle, contexts: int) -> Oracle:
    """Add the cached length to the positions of a plan so many times more."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        context = np.zeros(batch.num_tokens, np.int64)
        live = int(batch.cu_seqlens_q[-1])
        context[:live] = np.repeat(context_lens(batch), batch.query_lens)
        return Metadata(right.positions + contexts * context, right.slot_mapping)

    return replace(oracle, metadata=metadata)


@breaks(Fault.POSITION, "S-3", cites="FastDeploy#7727")
def context_is_added_twice(oracle: Oracle) -> Oracle:
    """Positions add the cached length and the length that holds it already."""
    return _placing(oracle, 1)


@breaks(Fault.POSITION, "S-3", cites="FastDeploy#7727")
def positions_start_anew_in_each_chunk(oracle: Oracle) -> Oracle:
    """Positions count from the chunk's first token."""
    return _placing(oracle, -1)


@breaks(Fault.POSITION, "S-1", "S-3", "S-10", cites="vllm#54498 vllm#54519")
def slots_follow_positions(oracle: Oracle) -> Oracle:
    """Siblings of a tree share a slot, because they share a position."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        slots = right.slot_mapping.copy()
        rows = np.repeat(np.arange(batch.num_rows), batch.query_lens)
        for token, row in enumerate(rows.tolist()):
            block, index = divmod(int(right.positions[token]), problem.block_size)
            if slots[token] >= 0:
                slots[token] = int(batch.block_table[row, block]) * problem.block_size + index
        return Metadata(right.positions, slots)

    return replace(oracle, metadata=metadata)
