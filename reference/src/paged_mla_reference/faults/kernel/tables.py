"""Faults of the block table: its width, its rows, its order, and entries after a row's end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.addressing import as_dense
from paged_mla_reference.faults.kernel.change import (
    by_slot,
    seeing,
    wide_table,
    with_batch,
    with_columns,
    with_problem,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import blocks_of, slots_of
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem


@kernel_fault(FaultClass.STRIDE, "S-1", "S-5", "S-7", "S-9", cites="rtp-llm#1258")
def table_is_taken_for_dense(oracle: Oracle) -> Oracle:
    """The strides of the block table are ignored, as if it were contiguous."""
    return with_batch(oracle, lambda _, b: replace(b, block_table=as_dense(b.block_table)))


@kernel_fault(FaultClass.STRIDE, "S-1", "S-5", "S-7", "S-9", cites="cutlass#2221")
def table_width_is_the_longest_row(oracle: Oracle) -> Oracle:
    """The block table is read as if it were only as wide as the longest row needs."""
    return with_batch(oracle, as_wide_as_the_longest_row)


def as_wide_as_the_longest_row(problem: Problem, batch: Batch) -> Batch:
    """Return the batch with a table that is read with the width that the longest row needs."""
    used = blocks_of(int(batch.seq_lens.max(initial=0)), problem.block_size)
    flat = np.ascontiguousarray(batch.block_table).ravel()[: used * batch.num_rows]
    return replace(batch, block_table=flat.reshape(batch.num_rows, used))


@kernel_fault(FaultClass.STRIDE, "S-1", "S-5", "S-7", "S-9", through=with_batch)
def table_rows_are_aligned_to_four_entries(problem: Problem, batch: Batch) -> Batch:
    """With 40 table columns or more, a row's start is rounded down to a multiple of 4 entries."""
    rows, width = batch.block_table.shape
    if width < 40:
        return batch
    starts = np.arange(rows) * width // 4 * 4
    read = batch.block_table.ravel()[starts[:, None] + np.arange(width)]
    return replace(batch, block_table=read % problem.num_blocks)


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-6", "S-7", "S-9", through=with_batch)
def padded_rows_have_no_row_in_the_table(problem: Problem, batch: Batch) -> Batch:
    """Padded rows are not counted in the row index of the block table."""
    live = batch.seq_lens > 0
    table = batch.block_table[np.cumsum(live) - live]
    return replace(batch, block_table=table % problem.num_blocks)


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", "S-19", through=with_batch)
def a_prefix_of_the_first_and_last_rows_is_everybodys(problem: Problem, batch: Batch) -> Batch:
    """Leading blocks that the first and the last rows share are used for all rows."""
    if not batch.num_rows:
        return batch
    ends = batch.block_table[[0, -1], : batch.seq_lens[[0, -1]].min() // problem.block_size]
    shared = int(np.cumprod(ends[0] == ends[1]).sum())
    table = batch.block_table.copy()
    table[:, :shared] = ends[0, :shared]
    return replace(batch, block_table=table)


@kernel_fault(
    FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", cites="flashinfer#3219", through=with_batch
)
def blocks_are_taken_for_consecutive(_: Problem, batch: Batch) -> Batch:
    """A row's blocks are read as if they were consecutive, from its first block."""
    steps = np.arange(batch.block_table.shape[1], dtype=np.int64)
    return replace(batch, block_table=batch.block_table[:, :1].astype(np.int64) + steps)


@kernel_fault(
    FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", cites="sglang@KNOWN_FAILURES", through=with_batch
)
def blocks_are_sorted(problem: Problem, batch: Batch) -> Batch:
    """A row's blocks are read in ascending order of their ids."""
    table = batch.block_table.copy()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        table[row, : blocks_of(seq_len, problem.block_size)].sort()
    return replace(batch, block_table=table)


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", cites="FastDeploy#7727 aiter#4365")
def block_size_falls_back_to_64(oracle: Oracle) -> Oracle:
    """The cache is read with a block size of 64."""
    widened = with_batch(oracle, lambda problem, batch: wide_table(batch, 1, problem.max_model_len))
    return with_problem(widened, lambda problem: replace(problem, block_size=64))


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", cites="aiter#2996 aiter#3095")
def table_entries_are_taken_for_slots(oracle: Oracle) -> Oracle:
    """Block table entries are read as slots, as if the block size were 1."""
    widened = with_batch(oracle, lambda problem, batch: wide_table(batch, 1, problem.max_model_len))
    return with_problem(widened, lambda problem: replace(problem, block_size=1))


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9")
def key_tiles_lie_in_one_block(oracle: Oracle) -> Oracle:
    """With blocks of more than 32 tokens, a tile of 32 keys is read from its first key's block."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        def found(table_row: NDArray[Any], index: NDArray[np.int64]) -> NDArray[np.int64]:
            inside = index % 32
            return slots_of(table_row, index - inside, problem.block_size) + inside

        if problem.block_size > 32:
            problem, batch = by_slot(problem, batch, found)
        return oracle.attend(problem, batch, image)

    return replace(oracle, attend=attend)


@kernel_fault(FaultClass.PAGE, "S-4", "S-5", "S-7", "S-9", cites="flashinfer#4347", through=seeing)
def only_128_tokens_of_a_block_are_read(
    problem: Problem, _b: Batch, _r: int, seen: NDArray[np.bool_]
) -> Any:
    """Only the first 128 tokens of each block are read."""
    return seen & (np.arange(seen.shape[1]) % problem.block_size < 128)


@kernel_fault(
    FaultClass.PAGE,
    "S-1",
    "S-5",
    "S-7",
    "S-9",
    cites="flashinfer#3022 flashinfer#810",
    through=with_batch,
)
def small_blocks_are_read_from_the_next(problem: Problem, batch: Batch) -> Batch:
    """With blocks of fewer than 64 tokens, the next block table entry is read."""
    late = np.roll(batch.block_table, -1, axis=1)
    return batch if problem.block_size >= 64 else replace(batch, block_table=late)


@kernel_fault(
    FaultClass.TABLE_TAIL, "S-5", "S-9", cites="vllm#27909 vllm#45380 pegainfer#291", through=seeing
)
def next_block_is_read_too(
    problem: Problem, batch: Batch, row: int, seen: NDArray[np.bool_]
) -> Any:
    """The kernel reads to the end of the block after a row's last block."""
    if not batch.seq_lens[row]:
        return seen
    blocks = blocks_of(int(batch.seq_lens[row]), problem.block_size) + 1
    return with_columns(seen, blocks * problem.block_size)


@kernel_fault(FaultClass.TABLE_TAIL, "S-6", "S-9", "S-5", cites="vllm#35969", through=with_batch)
def padded_row_reads_the_row_before(problem: Problem, batch: Batch) -> Batch:
    """Padded rows read keys through the block table of the first row that has keys."""
    padded = batch.seq_lens == 0
    if not padded.any() or padded.all():
        return batch
    table, before = batch.block_table.copy(), np.flatnonzero(~padded)[0]
    table[padded] = batch.block_table[before]
    lengths = np.where(padded, np.maximum(batch.query_lens, 1), batch.seq_lens)
    widened = replace(batch, block_table=table, seq_lens=lengths.astype(np.int32))
    return wide_table(widened, problem.block_size, int(lengths.max()))
