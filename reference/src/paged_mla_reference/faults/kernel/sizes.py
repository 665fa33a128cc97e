"""Faults that show only at large sizes: tables, counters and buffers that are too small."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    Seen,
    answering,
    forgetting,
    of_rows,
    only_before,
    seeing,
    with_batch,
    writing,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

READ = ("S-4", "S-5", "S-7")  # rules that detect wrong keys
LOST = ("S-5", "S-6", "S-7")  # rules that detect missing outputs


def _ending(oracle: Oracle, keys: Callable[[Problem], int]) -> Oracle:
    """Return an oracle that reads only the first `keys(problem)` keys of every row."""
    return seeing(oracle, lambda problem, _b, _r, seen: only_before(seen, keys(problem)))


@kernel_fault(FaultClass.TRUNCATED, *READ, akin="vllm-ascend#14464")
def keys_past_4096_are_dropped(oracle: Oracle) -> Oracle:
    """The kernel reads only the first 4096 keys of a row."""
    return _ending(oracle, lambda _: 4096)


@kernel_fault(FaultClass.TRUNCATED, *READ, akin="vllm-deepseek-v4-sm89#46")
def keys_past_16384_are_dropped(oracle: Oracle) -> Oracle:
    """The kernel reads only the first 16384 keys of a row."""
    return _ending(oracle, lambda _: 16384)


@kernel_fault(FaultClass.TRUNCATED, *READ, cites="tpu-inference#2756 sglang-jax#1649")
def keys_past_32767_are_dropped(oracle: Oracle) -> Oracle:
    """The kernel reads only the first 32767 keys of a row, as with signed 16-bit indices."""
    return _ending(oracle, lambda _: 32767)


@kernel_fault(FaultClass.TRUNCATED, "S-1", *READ)
def only_512_table_entries_are_read(oracle: Oracle) -> Oracle:
    """The kernel reads only the first 512 block table entries of a row."""
    return _ending(oracle, lambda problem: 512 * problem.block_size)


@kernel_fault(FaultClass.OFFSET, "S-1", "S-9", *READ, through=with_batch)
def table_columns_keep_16_bits(_: Problem, batch: Batch) -> Batch:
    """Block table columns keep only 16 bits: block 65536 of a row is read as its block 0."""
    columns = np.arange(batch.block_table.shape[1]) % 2**16
    return replace(batch, block_table=batch.block_table[:, columns])


@kernel_fault(FaultClass.TRUNCATED, *READ, akin="vllm-ascend#14464", through=seeing)
def keys_of_many_pairs_end_at_4096(problem: Problem, _b: Batch, _row: int, seen: Seen) -> Seen:
    """Rows with more than 128 pairs of query and head see only their first 4096 keys."""
    many = len(seen) * problem.dims.num_heads > 128
    return only_before(seen, 4096) if many else seen


@kernel_fault(FaultClass.TRUNCATED, *LOST, akin="flashinfer#3125 sglang#34947")
def queries_past_512_are_not_answered(oracle: Oracle) -> Oracle:
    """Query tokens after the first 512 of a batch get no output."""
    return forgetting(oracle, lambda batch: np.arange(batch.num_tokens) >= 512)


@kernel_fault(FaultClass.TRUNCATED, *LOST, akin="kern#3")
def rows_past_256_are_not_answered(oracle: Oracle) -> Oracle:
    """Rows after the first 256 get no output."""
    return forgetting(
        oracle, lambda b: np.arange(b.num_tokens) >= b.cu_seqlens_q[min(256, b.num_rows)]
    )


@kernel_fault(FaultClass.TRUNCATED, *LOST, through=forgetting)
def rows_past_the_last_full_group_are_not_served(batch: Batch) -> NDArray[np.bool_]:
    """With more than four rows, rows after the last full group of four get no output."""
    rows = batch.num_rows
    return of_rows(batch, np.arange(rows) >= (rows // 4 * 4 or rows))


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-3", "S-10")
def rows_past_256_are_not_planned(oracle: Oracle) -> Oracle:
    """Rows after the first 256 get positions of 0 and no slots."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        first = int(batch.cu_seqlens_q[min(256, batch.num_rows)])
        right.positions[first:], right.slot_mapping[first:] = 0, -1
        return right

    planning = replace(oracle, metadata=metadata)
    return writing(planning, lambda _p, _b, slots: slots)


@kernel_fault(FaultClass.OFFSET, "S-1", "S-6", "S-9", *READ, through=with_batch)
def row_numbers_keep_8_bits(_: Problem, batch: Batch) -> Batch:
    """Row indices keep only 8 bits: row 256 uses the block table and the length of row 0."""
    rows = np.arange(batch.num_rows) % 256
    return replace(batch, block_table=batch.block_table[rows], seq_lens=batch.seq_lens[rows])


@kernel_fault(FaultClass.TRUNCATED, "S-10", akin="SharpMind#57 rMLX#238", through=writing)
def tokens_past_512_are_not_written(
    _p: Problem, _b: Batch, slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The append writes only the first 512 tokens of a batch."""
    slots[512:] = -1
    return slots


@kernel_fault(FaultClass.OFFSET, *LOST, akin="vllm#45373 sglang#20389", through=answering)
def token_heads_wrap_at_2_14(_p: Problem, _b: Batch, answer: Output) -> Output:
    """Indices of token and head keep only 14 bits: late outputs overwrite early outputs."""
    out = answer.out.reshape(-1, answer.out.shape[-1])  # [T * H, R]
    wrapped = np.zeros_like(out)
    wrapped[np.arange(len(out)) % 2**14] = out
    return Output(wrapped.reshape(answer.out.shape), answer.lse)


@kernel_fault(FaultClass.POSITION, "S-3", akin="llama.cpp#19724")
def positions_keep_16_bits(oracle: Oracle) -> Oracle:
    """The positions of a plan keep only 16 bits: position 65536 is 0."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        right = oracle.metadata(problem, batch)
        return Metadata(right.positions % 2**16, right.slot_mapping)

    return replace(oracle, metadata=metadata)


@kernel_fault(FaultClass.LENGTH, "S-1", "S-3", akin="llama.cpp#19724")
def planned_lengths_keep_16_bits(oracle: Oracle) -> Oracle:
    """The lengths of a plan keep only 16 bits: a row of 65536 tokens is treated as padding."""

    def metadata(problem: Problem, batch: Batch) -> Metadata:
        return oracle.metadata(problem, replace(batch, seq_lens=batch.seq_lens % 2**16))

    return replace(oracle, metadata=metadata)
