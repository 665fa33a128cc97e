"""Wrong gathers of cached tokens: places they are read from, and places they are put."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.addressing import wrapping
from paged_mla_reference.faults.kernel.change import by_slot, context_of
from paged_mla_reference.faults.kernel.tables import as_wide_as_the_longest_row
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import blocks_of, slots_of
from paged_mla_reference.rules.slots import Tokens
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

Ints = NDArray[np.int64]


def _reading(oracle: Oracle, change: Callable[[Problem, Batch], Batch]) -> Oracle:
    """Let a gather take another batch."""
    return replace(
        oracle,
        gather_context=lambda problem, batch, image: oracle.gather_context(
            problem, change(problem, batch), image
        ),
    )


@kernel_fault(FaultClass.OFFSET, "S-1", "S-9", cites="vllm#50427")
def gather_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """Element offsets of gathered context keep 31 bits."""
    return _reading(oracle, wrapping(31))


@kernel_fault(
    FaultClass.TABLE_TAIL, "S-1", "S-9", cites="vllm#27909 vllm#45537 vllm#49427", through=_reading
)
def gather_reads_every_table_entry(problem: Problem, batch: Batch) -> Batch:
    """Gathered context takes its last block from the end of the table."""
    table = batch.block_table.copy()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        if seq_len:
            table[row, blocks_of(seq_len, problem.block_size) - 1] = table[row, -1]
    return replace(batch, block_table=table)


@kernel_fault(FaultClass.STRIDE, "S-1", "S-9")
def gathers_take_the_table_for_as_wide_as_the_longest_row(oracle: Oracle) -> Oracle:
    """A gather reads rows of the table as if they were as wide as the longest row needs."""
    return _reading(oracle, as_wide_as_the_longest_row)


def _finding(oracle: Oracle, place: Callable[[Ints, int], Ints]) -> Oracle:
    """Let a gather look elsewhere in a block, given indices of tokens and the block size."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        size = problem.block_size

        def found(table_row: NDArray[Any], index: Ints) -> Ints:
            return slots_of(table_row, index // size * size, size) + place(index, size)

        return oracle.gather_context(*by_slot(problem, batch, found), image)

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.OFFSET, "S-1", "S-9")
def gathered_places_keep_8_bits_with_a_sign(oracle: Oracle) -> Oracle:
    """Tokens past the 128th of a block are gathered from 256 slots before their own."""
    return _finding(oracle, lambda index, size: (index % size + 128) % 256 - 128)


@kernel_fault(FaultClass.PAGE, "S-1", "S-9")
def gathered_places_are_masked_bits(oracle: Oracle) -> Oracle:
    """A gather takes a token's place in its block by `& (block_size - 1)`."""
    return _finding(oracle, lambda index, size: index & (size - 1))


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9", akin="vllm-deepseek-v4-sm89#46")
def gathered_rows_end_at_256_tokens(oracle: Oracle) -> Oracle:
    """A workspace holds 256 tokens of a row; what lies past them stays 0."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        index = np.concatenate([np.zeros(0, np.int64), *map(np.arange, batch.seq_lens)])
        ckv = np.where((index < 256)[:, None], ckv, ckv.dtype.type(0))
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.PARTIAL, "S-1", "S-9", cites="vllm#48611")
def gathered_rows_keep_the_first_length(oracle: Oracle) -> Oracle:
    """Gathered context of all rows is as long as that of the first."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        last = np.cumsum(batch.seq_lens)[:-1]
        ckv, k_pe = ckv.copy(), k_pe.copy()
        ckv[last[last < len(ckv)]] = 0
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9")
def gathers_end_at_32768_tokens(oracle: Oracle) -> Oracle:
    """What a gather returns is 0 past its first 32768 tokens, of all rows together."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = (part.copy() for part in oracle.gather_context(problem, batch, image))
        ckv[32768:], k_pe[32768:] = 0, 0
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9")
def gathers_sum_the_lengths_of_two_tiles(oracle: Oracle) -> Oracle:
    """A gathered row is put behind the rows of its tile of 32 rows and of the tile before alone."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        right = oracle.gather_context(problem, batch, image)
        wrong = np.zeros_like(right[0]), np.zeros_like(right[1])
        ends = np.cumsum(batch.seq_lens)
        for row, (end, seq_len) in enumerate(zip(ends, batch.seq_lens, strict=True)):
            start = batch.seq_lens[max(row // 32 - 1, 0) * 32 : row].sum()
            for source, target in zip(right, wrong, strict=True):
                target[start : start + seq_len] = source[end - seq_len : end]
        return wrong

    return replace(oracle, gather_context=gather)


def _repeating(oracle: Oracle, change: Callable[[Batch, int, Ints], Ints]) -> Oracle:
    """Let a gather return other tokens of a row, given the row and where the right ones are."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        rows = np.split(np.arange(len(ckv)), np.cumsum(batch.seq_lens)[:-1])
        taken = [change(batch, row, tokens) for row, tokens in enumerate(rows) if len(tokens)]
        index = np.concatenate([np.zeros(0, np.int64), *taken])
        return ckv[index], k_pe[index]

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9", through=_repeating)
def gathers_repeat_the_last_token_of_a_context(batch: Batch, row: int, tokens: Ints) -> Ints:
    """For a row of more than 58 new tokens a gather repeats the last one before them."""
    context = context_of(batch, row)
    long = batch.query_lens[row] > 58 and context
    return np.minimum(tokens, tokens[context - 1]) if long else tokens


@kernel_fault(FaultClass.EMPTY, "S-1", "S-9", through=_repeating)
def gathered_rows_without_queries_repeat_their_first_token(
    batch: Batch, row: int, tokens: Ints
) -> Ints:
    """A gather repeats the first token of rows without queries."""
    return tokens if batch.query_lens[row] else np.full_like(tokens, tokens[0])


@kernel_fault(FaultClass.EMPTY, "S-1", "S-9", through=_repeating)
def gathered_rows_behind_an_empty_one_take_a_token(batch: Batch, row: int, tokens: Ints) -> Ints:
    """The first gathered token of a row behind one without keys is the last one before it."""
    if row and tokens[0] and not batch.seq_lens[row - 1]:
        tokens[0] -= 1
    return tokens
