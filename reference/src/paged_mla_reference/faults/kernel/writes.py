"""Faults of writes to the cache: missing writes, and writes to wrong slots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    appending,
    context_of,
    of_rows,
    slots_to_write,
    writing,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.cache import read_slots, write_slots
from paged_mla_reference.rules.paging import query_spans, slots_of
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Problem

Slots = NDArray[np.int64]


@kernel_fault(FaultClass.WRITE, "S-10", cites="vllm#39444", through=writing)
def padding_writes_slot_0(_p: Problem, _b: Batch, slots: Slots) -> Slots:
    """Padding has slot 0 instead of -1, so that a padded token is written to slot 0."""
    padding = np.flatnonzero(slots < 0)
    if 0 not in slots:
        slots[padding[:1]] = 0
    return slots


@kernel_fault(FaultClass.WRITE, "S-10", cites="vllm#43810 vllm#43869", through=writing)
def slot_minus_one_is_the_last(problem: Problem, _b: Batch, slots: Slots) -> Slots:
    """A token with slot -1 is written to the last slot of the cache."""
    last = problem.num_blocks * problem.block_size - 1
    if last not in slots:
        slots[np.flatnonzero(slots < 0)[:1]] = last
    return slots


@kernel_fault(
    FaultClass.WRITE,
    "S-9",
    "S-10",
    cites="vllm#56734 vllm#49757 vllm-ascend#15417",
    through=writing,
)
def padded_rows_write_through_their_tables(problem: Problem, batch: Batch, slots: Slots) -> Slots:
    """A token of a padded row is written to the first block of the row's block table."""
    for row in np.flatnonzero((batch.seq_lens == 0) & (batch.query_lens > 0)).tolist():
        block = int(batch.block_table[row, 0])
        if 0 <= block < problem.num_blocks and block * problem.block_size not in slots:
            slots[batch.cu_seqlens_q[row]] = block * problem.block_size
    return slots


@kernel_fault(FaultClass.WRITE, "S-10", cites="MoE-Infinity#195 lucebox#555", through=writing)
def the_last_token_is_not_written(_p: Problem, _b: Batch, slots: Slots) -> Slots:
    """The last token of the step that has a slot is not written."""
    slots[np.flatnonzero(slots >= 0)[-1:]] = -1
    return slots


@kernel_fault(FaultClass.WRITE, "S-10", akin="1bit-MONSTER#686", through=writing)
def the_first_token_of_a_chunk_is_not_written(_p: Problem, batch: Batch, slots: Slots) -> Slots:
    """In rows of several tokens, the first token is not written."""
    starts = batch.cu_seqlens_q[:-1][batch.query_lens > 1]
    slots[starts] = -1
    return slots


@kernel_fault(FaultClass.WRITE, "S-10", cites="1bit-MONSTER#686", through=writing)
def only_the_first_token_is_written(_p: Problem, batch: Batch, slots: Slots) -> Slots:
    """Only the first token of each row is written."""
    kept = np.full_like(slots, -1)
    starts = batch.cu_seqlens_q[:-1][batch.query_lens > 0]
    kept[starts] = slots[starts]
    return kept


@kernel_fault(FaultClass.WRITE, "S-10", cites="tt-metal#55742", through=writing)
def an_odd_batch_leaves_out_its_last_row(_p: Problem, batch: Batch, slots: Slots) -> Slots:
    """If a batch has an odd number of rows, from 3 on, its last row is not written."""
    if batch.num_rows % 2 and batch.num_rows > 1:
        slots[batch.cu_seqlens_q[-2] :] = -1
    return slots


@kernel_fault(
    FaultClass.CONTINUATION, "S-1", "S-10", cites="tt-metal#55630 pypto-lib#160", through=writing
)
def chunks_are_written_to_the_first_blocks(problem: Problem, batch: Batch, slots: Slots) -> Slots:
    """Rows of several tokens are written from the row's first block, over their context."""
    for row in np.flatnonzero((batch.query_lens > 1) & (batch.seq_lens > 0)).tolist():
        first, last = batch.cu_seqlens_q[row : row + 2].tolist()
        index = np.arange(last - first)
        slots[first:last] = slots_of(batch.block_table[row], index, problem.block_size)
    return slots


def _planned(oracle: Oracle, change: Callable[[Problem, Batch, Metadata], None]) -> Oracle:
    """Return an oracle with a changed plan; append also uses it for batches without slot_mapping.

    `change` takes the problem, the batch and the plan, and changes the plan in place.
    """

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        plan = oracle.metadata(problem, batch)
        change(problem, batch, plan)
        return plan

    planned = replace(oracle, metadata=metadata)
    return writing(planned, lambda _p, _b, slots: slots)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-3", "S-10", through=_planned)
def rows_far_past_the_mean_length_are_not_planned(_: Problem, batch: Batch, plan: Metadata) -> None:
    """A plan omits tokens of a row after the tiles of 16 that the mean row of the step needs."""
    mean = -(-int(batch.cu_seqlens_q[-1]) // max(batch.num_rows, 1))
    covered = -(-mean // 16) * 16
    for span in query_spans(batch):
        plan.positions[span][covered:], plan.slot_mapping[span][covered:] = 0, -1


@kernel_fault(FaultClass.PAGE, "S-1", "S-10", through=_planned)
def slots_run_on_past_a_block(problem: Problem, batch: Batch, plan: Metadata) -> None:
    """In rows of at most 47 tokens, slots are consecutive even past the end of a block."""
    for span in query_spans(batch):
        slots = plan.slot_mapping[span]
        if 0 < len(slots) <= 47 and slots[0] >= 0:
            run = slots[0] + np.arange(len(slots))
            slots[:] = run % (problem.num_blocks * problem.block_size)


@kernel_fault(FaultClass.WRITE, "S-1", "S-10", through=_planned)
def decode_tokens_stay_in_the_block_before(problem: Problem, batch: Batch, plan: Metadata) -> None:
    """The new token of a decode row is written to the block of the token before it."""
    size = problem.block_size
    for row in np.flatnonzero((batch.query_lens == 1) & (batch.seq_lens > 1)).tolist():
        context = np.array([context_of(batch, row)])
        before = slots_of(batch.block_table[row], context - 1, size) // size
        plan.slot_mapping[batch.cu_seqlens_q[row]] = (before * size + context % size)[0]


@kernel_fault(FaultClass.CONTINUATION, "S-1", "S-10", through=_planned)
def long_chunks_are_written_from_the_edge_of_their_block(
    problem: Problem, batch: Batch, plan: Metadata
) -> None:
    """Rows of over 121 new tokens are written from the start of the first new token's block."""
    size = problem.block_size
    for row in np.flatnonzero((batch.query_lens > 121) & (batch.seq_lens > 0)).tolist():
        span, context = query_spans(batch)[row], context_of(batch, row)
        index = context - context % size + np.arange(span.stop - span.start)
        plan.slot_mapping[span] = slots_of(batch.block_table[row], index, size)


@kernel_fault(FaultClass.WRITE, "S-10", through=writing)
def rows_without_a_first_slot_are_not_written(_p: Problem, batch: Batch, slots: Slots) -> Slots:
    """If the first token of a row has no slot, no token of the row is written."""
    for span in query_spans(batch):
        if (slots[span][:1] < 0).any():
            slots[span] = -1
    return slots


@kernel_fault(FaultClass.WRITE, "S-1", "S-10", cites="onnxruntime-genai#2354", through=writing)
def slots_are_one_late(problem: Problem, batch: Batch, slots: Slots) -> Slots:
    """The token of a decode row is written one slot too late."""
    moved = of_rows(batch, batch.query_lens == 1) & (slots >= 0)
    moved &= slots % problem.block_size < problem.block_size - 1
    slots[moved] += 1
    return slots


@kernel_fault(FaultClass.WRITE, "S-10", akin="LMCache#4921", through=writing)
def skipped_tokens_shift_the_others(_p: Problem, _b: Batch, slots: Slots) -> Slots:
    """Slots of -1 are removed from the slots, so that later tokens get wrong slots."""
    kept = slots[slots >= 0]
    out = np.full_like(slots, -1)
    out[: len(kept)] = kept
    return out


@kernel_fault(FaultClass.WRITE, "S-10", akin="LMCache#4921")
def named_slots_are_ignored(oracle: Oracle) -> Oracle:
    """slot_mapping is ignored; slots are derived from the block table."""

    def change(problem: Problem, batch: Batch, _: Slots) -> Slots:
        derived = slots_to_write(oracle, problem, replace(batch, slot_mapping=None))
        _, first = np.unique(derived, return_index=True)
        once = np.full_like(derived, -1)
        once[first] = derived[first]
        return once

    return writing(oracle, change)


@kernel_fault(FaultClass.WRITE, "S-10", cites="1Cat-vLLM#162")
def k_pe_is_not_written(oracle: Oracle) -> Oracle:
    """Rotated keys are not written, only latents."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        slots = slots_to_write(oracle, problem, batch)
        slots = slots[slots >= 0]
        _, kept = read_slots(image, slots)
        written = oracle.append(problem, batch, image)
        ckv, _ = read_slots(written, slots)
        return write_slots(written, slots, ckv, kept)

    return replace(oracle, append=append)


def _clearing(oracle: Oracle, cleared: Callable[[Problem, Slots], Slots]) -> Oracle:
    """Return an oracle whose append also zeroes other slots.

    `cleared` takes the problem and the written slots, and returns the slots to zero.
    """

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        written = oracle.append(problem, batch, image)
        slots = slots_to_write(oracle, problem, batch)
        slots = slots[slots >= 0]
        rest = np.setdiff1d(cleared(problem, slots), slots)
        ckv, k_pe = (np.zeros((len(rest), x.shape[1]), x.dtype) for x in (batch.ckv, batch.k_pe))
        return write_slots(written, rest, ckv, k_pe)

    return replace(oracle, append=append)


@kernel_fault(FaultClass.WRITE, "S-10", cites="vllm#52709", through=_clearing)
def the_rest_of_the_block_is_cleared(problem: Problem, slots: Slots) -> Slots:
    """A write also zeroes the next slot of its block."""
    return slots[(slots + 1) % problem.block_size > 0] + 1


@kernel_fault(FaultClass.WRITE, "S-10", cites="vllm#52709", through=_clearing)
def fresh_blocks_are_cleared_past_their_end(problem: Problem, slots: Slots) -> Slots:
    """A write to the first slot of a block also zeroes the first slot of the next block."""
    found: Slots = slots[slots % problem.block_size == 0] + problem.block_size
    return np.minimum(found, (problem.num_blocks - 1) * problem.block_size)


@kernel_fault(FaultClass.WRITE, "S-10", cites="vllm#43152")
def append_writes_its_inputs(oracle: Oracle) -> Oracle:
    """The append changes its input k_pe in place."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        written = oracle.append(problem, batch, image)
        batch.k_pe[:1] = 0
        return written

    return replace(oracle, append=append)


def _storing(oracle: Oracle, change: Callable[[Problem, NDArray[Any]], NDArray[Any]]) -> Oracle:
    """Return an oracle whose append stores changed values of ckv and k_pe."""
    return appending(
        oracle,
        lambda p, b: replace(b, ckv=change(p, b.ckv), k_pe=change(p, b.k_pe)),
    )


@kernel_fault(FaultClass.WRITE, "S-10", through=_storing)
def negative_zero_loses_its_sign(_: Problem, x: NDArray[Any]) -> NDArray[Any]:
    """Negative zeros are stored as positive zeros."""
    with np.errstate(invalid="ignore"):  # signaling NaN
        return np.where(x == 0, x.dtype.type(0), x)


@kernel_fault(FaultClass.WRITE, "S-10")
def signalling_nan_becomes_quiet(oracle: Oracle) -> Oracle:
    """Signaling NaNs are stored as quiet NaNs."""
    return _storing(oracle, lambda p, x: round_to(widen(x), p.dtype))


@kernel_fault(FaultClass.WRITE, "S-10")
def nan_is_stored_as_0(oracle: Oracle) -> Oracle:
    """NaN is stored as 0."""
    return _storing(oracle, lambda _, x: np.where(np.isnan(x), x.dtype.type(0), x))


@kernel_fault(FaultClass.PRECISION, "S-10", akin="flashinfer#5107")
def rows_are_stored_in_bfloat16(oracle: Oracle) -> Oracle:
    """Stored latents and rotated keys are rounded to bfloat16."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        slots = slots_to_write(oracle, problem, batch)
        slots = slots[slots >= 0]
        written = oracle.append(problem, batch, image)
        stored = read_slots(written, slots)
        ckv, k_pe = (widen(round_to(x, "bfloat16")).astype(x.dtype) for x in stored)
        return write_slots(written, slots, ckv, k_pe)

    return replace(oracle, append=append)
