"""Faults of rows without visible keys, of padding, and of NaN in memory that is not read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import answering, of_rows, with_batch
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import blocks_of, query_spans
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Output, Problem


def _where_empty(oracle: Oracle, **values: float) -> Oracle:
    """Return an oracle with other values in the output of queries without visible keys."""

    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        empty = np.isneginf(answer.lse)
        for name, value in values.items():
            getattr(answer, name)[empty] = value
        return answer

    return answering(oracle, change)


@kernel_fault(FaultClass.EMPTY, "S-6", cites="flashinfer#4401 vllm#27491 vllm#57017")
def empty_rows_divide_zero_by_zero(oracle: Oracle) -> Oracle:
    """The output of a query without visible keys is NaN."""
    return _where_empty(oracle, out=np.nan)


@kernel_fault(FaultClass.EMPTY, "S-6", cites="flashinfer#3047 sglang#22291 sglang#22688")
def empty_rows_are_not_written(oracle: Oracle) -> Oracle:
    """The kernel does not write the output of a query without visible keys."""
    return _where_empty(oracle, out=0.25)


@kernel_fault(FaultClass.EMPTY, "S-6", cites="vllm#49294 vllm#49334")
def empty_rows_have_a_finite_lse(oracle: Oracle) -> Oracle:
    """The lse of a query without visible keys is 0."""
    return _where_empty(oracle, lse=0.0)


@kernel_fault(FaultClass.EMPTY, "S-6", cites="vllm#15492")
def empty_rows_have_an_infinite_lse(oracle: Oracle) -> Oracle:
    """The lse of a query without visible keys is +inf."""
    return _where_empty(oracle, lse=np.inf)


@kernel_fault(FaultClass.EMPTY, "S-6", cites="flashinfer#4450")
def empty_rows_have_the_sentinel_as_lse(oracle: Oracle) -> Oracle:
    """The lse of a query without visible keys is -1e30, the fill value of masked scores."""
    return _where_empty(oracle, lse=-1e30)


@kernel_fault(FaultClass.EMPTY, "S-6", through=answering)
def padded_rows_of_non_causal_steps_have_an_infinite_lse(
    problem: Problem, batch: Batch, answer: Output
) -> Output:
    """Without a causal mask, the lse of a padded row's queries is +inf."""
    if problem.mask is Mask.NON_CAUSAL:
        answer.lse[of_rows(batch, batch.seq_lens == 0)] = np.inf
    return answer


@kernel_fault(FaultClass.EMPTY, "S-6", through=answering)
def padding_past_256_tokens_is_not_written(_p: Problem, batch: Batch, answer: Output) -> Output:
    """The kernel does not write the padded tokens after the first 256 at the end of a step."""
    late = int(batch.cu_seqlens_q[-1]) + 256
    answer.out[late:], answer.lse[late:] = 0.25, 0.25
    return answer


@kernel_fault(
    FaultClass.EMPTY, "S-2", "S-5", "S-6", "S-7", cites="flashinfer@446a0adf1", through=answering
)
def rows_without_queries_take_a_token(_p: Problem, batch: Batch, answer: Output) -> Output:
    """After each row without queries, outputs are read one token too late."""
    late = 0
    out, lse = answer.out.copy(), answer.lse.copy()
    for span in query_spans(batch):
        if span.start == span.stop:
            late += 1
        source = np.minimum(np.arange(span.start, span.stop) + late, max(len(out) - 1, 0))
        out[span], lse[span] = answer.out[source], answer.lse[source]
    return Output(out, lse)


def _ending(oracle: Oracle, first: int) -> Oracle:
    """Return an oracle in which out is 0 from the first padded row on, starting at row `first`."""

    def change(_p: Problem, batch: Batch, answer: Output) -> Output:
        padded = first + np.flatnonzero(batch.seq_lens[first:] == 0)
        if padded.size:
            answer.out[batch.cu_seqlens_q[padded[0]] :] = 0
        return answer

    return answering(oracle, change)


@kernel_fault(FaultClass.EMPTY, "S-2", "S-5", "S-6", cites="sglang#5875")
def rows_behind_an_empty_one_are_not_served(oracle: Oracle) -> Oracle:
    """The loop over rows ends at the first padded row."""
    return _ending(oracle, 0)


@kernel_fault(FaultClass.EMPTY, "S-2", "S-5", "S-6")
def rows_behind_a_late_empty_one_are_not_served(oracle: Oracle) -> Oracle:
    """The loop over rows ends at the first padded row from row 32 on."""
    return _ending(oracle, 32)


@kernel_fault(FaultClass.EMPTY, "S-1", "S-2", "S-5", "S-7", "S-9", through=with_batch)
def rows_behind_one_without_queries_take_its_table(problem: Problem, batch: Batch) -> Batch:
    """A row after a row with keys but without queries reads the block table of that row."""
    table = batch.block_table.copy()
    idle = np.flatnonzero((batch.seq_lens[:-1] > 0) & (batch.query_lens[:-1] == 0))
    table[idle + 1] = batch.block_table[idle] % problem.num_blocks
    return replace(batch, block_table=table)


@kernel_fault(FaultClass.PAD_VALUE, "S-6", "S-9", cites="vllm#37442", through=answering)
def padded_tokens_get_the_last_answer(_p: Problem, batch: Batch, answer: Output) -> Output:
    """Padded tokens after the last row get the output of its last token."""
    live = int(batch.cu_seqlens_q[-1])
    if live:
        answer.out[live:], answer.lse[live:] = answer.out[live - 1], answer.lse[live - 1]
    return answer


@kernel_fault(FaultClass.LEAK, "S-9", cites="vllm#37442", through=answering)
def padded_queries_spoil_a_shared_maximum(_p: Problem, batch: Batch, answer: Output) -> Output:
    """A NaN in a padded query makes every output NaN, through a maximum over the whole batch."""
    if np.isnan(batch.q_nope.astype(np.float32)).any():
        answer.out[:] = np.nan
    return answer


def _leaking(oracle: Oracle, poisoned: Any) -> Oracle:
    """Return an oracle that adds 0 times all latents of some blocks to a row's outputs.

    `poisoned` takes the problem, the batch and the row, and returns the ids of these blocks.
    """

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer = oracle.attend(problem, batch, image)
        for row, span in enumerate(query_spans(batch)):
            seq_len = int(batch.seq_lens[row])
            if seq_len and span.start < span.stop:
                values = image.layout.field(image.read(poisoned(problem, batch, row)), "ckv")
                unread: NDArray[Any] = values.reshape(-1, problem.dims.kv_lora_rank)
                answer.out[span] += (0 * unread.astype(np.float32)).sum(axis=0)
        return answer

    return replace(oracle, attend=attend)


@kernel_fault(
    FaultClass.LEAK,
    "S-9",
    cites="flashinfer#941 flash-attention#1745 flash-attention#2374 vllm#936 vllm#43961",
)
def unused_slots_weigh_zero(oracle: Oracle) -> Oracle:
    """Slots after the end of a row are multiplied by weight 0, so that their NaN stays."""
    return _leaking(oracle, _last_block)


def _last_block(problem: Problem, batch: Batch, row: int) -> NDArray[np.int64]:
    """Return the id of a row's last block, [1]."""
    last = blocks_of(int(batch.seq_lens[row]), problem.block_size) - 1
    return batch.block_table[row, last : last + 1].astype(np.int64)


@kernel_fault(FaultClass.LEAK, "S-9", through=_leaking)
def unused_slots_of_chunks_weigh_zero(
    problem: Problem, batch: Batch, row: int
) -> NDArray[np.int64]:
    """In rows of more than 17 queries, slots after the row's end are multiplied by weight 0."""
    last = _last_block(problem, batch, row)
    return last if batch.query_lens[row] > 17 else last[:0]


@kernel_fault(
    FaultClass.LEAK, "S-9", cites="aiter#4245 sglang#36207 sglang#36003", through=_leaking
)
def absent_blocks_are_folded_to_block_0(
    problem: Problem, batch: Batch, row: int
) -> NDArray[np.int64]:
    """Block table entries without a valid block id read block 0, with weight 0."""
    used = blocks_of(int(batch.seq_lens[row]), problem.block_size)
    tail = batch.block_table[row, used:]
    absent = (tail < 0) | (tail >= problem.num_blocks)
    return np.zeros(int(absent.any()), np.int64)


@kernel_fault(FaultClass.LEAK, "S-7", "S-9", cites="vllm#47305")
def huge_unused_slots_overflow(oracle: Oracle) -> Oracle:
    """The slot after a row's end is scored, and an infinite score makes the row's lse infinite."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer = oracle.attend(problem, batch, image)
        for row, span in enumerate(query_spans(batch)):
            block, index = divmod(int(batch.seq_lens[row]), problem.block_size)
            if not index or span.start == span.stop:
                continue
            ids = batch.block_table[row, block : block + 1].astype(np.int64)
            behind = image.layout.field(image.read(ids), "ckv")[0, index].astype(np.float32)
            if not (np.abs(behind) < 1e20).all():
                answer.lse[span] = np.inf
        return answer

    return replace(oracle, attend=attend)
