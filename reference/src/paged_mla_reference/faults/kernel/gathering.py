"""Faults of gathers: cached tokens are read from, or written to, wrong places."""

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
    """Return an oracle whose gather uses a changed batch."""
    return replace(
        oracle,
        gather_context=lambda problem, batch, image: oracle.gather_context(
            problem, change(problem, batch), image
        ),
    )


@kernel_fault(FaultClass.OFFSET, "S-1", "S-9", cites="vllm#50427")
def gather_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """The gather reads the cache with element offsets of only 31 bits."""
    return _reading(oracle, wrapping(31))


@kernel_fault(
    FaultClass.TABLE_TAIL, "S-1", "S-9", cites="vllm#27909 vllm#45537 vllm#49427", through=_reading
)
def gather_reads_every_table_entry(problem: Problem, batch: Batch) -> Batch:
    """The gather reads a row's last block from the last column of the block table."""
    table = batch.block_table.copy()
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        if seq_len:
            table[row, blocks_of(seq_len, problem.block_size) - 1] = table[row, -1]
    return replace(batch, block_table=table)


@kernel_fault(FaultClass.STRIDE, "S-1", "S-9")
def gathers_take_the_table_for_as_wide_as_the_longest_row(oracle: Oracle) -> Oracle:
    """The gather reads the block table as if it were only as wide as the longest row needs."""
    return _reading(oracle, as_wide_as_the_longest_row)


def _finding(oracle: Oracle, place: Callable[[Ints, int], Ints]) -> Oracle:
    """Return an oracle whose gather reads other offsets in a block.

    `place` takes token indices and the block size, and returns offsets in the block.
    """

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        size = problem.block_size

        def found(table_row: NDArray[Any], index: Ints) -> Ints:
            return slots_of(table_row, index // size * size, size) + place(index, size)

        return oracle.gather_context(*by_slot(problem, batch, found), image)

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.OFFSET, "S-1", "S-9")
def gathered_places_keep_8_bits_with_a_sign(oracle: Oracle) -> Oracle:
    """Offsets in a block are signed 8-bit numbers, so that offset 128 is read as -128."""
    return _finding(oracle, lambda index, size: (index % size + 128) % 256 - 128)


@kernel_fault(FaultClass.PAGE, "S-1", "S-9")
def gathered_places_are_masked_bits(oracle: Oracle) -> Oracle:
    """The gather computes offsets by `& (block_size - 1)`, wrong unless that is a power of two."""
    return _finding(oracle, lambda index, size: index & (size - 1))


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9", akin="vllm-deepseek-v4-sm89#46")
def gathered_rows_end_at_256_tokens(oracle: Oracle) -> Oracle:
    """Latents after the first 256 tokens of a row are gathered as 0."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        index = np.concatenate([np.zeros(0, np.int64), *map(np.arange, batch.seq_lens)])
        ckv = np.where((index < 256)[:, None], ckv, ckv.dtype.type(0))
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.PARTIAL, "S-1", "S-9", cites="vllm#48611")
def gathered_rows_keep_the_first_length(oracle: Oracle) -> Oracle:
    """The first gathered latent of each row after the first is 0."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        last = np.cumsum(batch.seq_lens)[:-1]
        ckv, k_pe = ckv.copy(), k_pe.copy()
        ckv[last[last < len(ckv)]] = 0
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9")
def gathers_end_at_32768_tokens(oracle: Oracle) -> Oracle:
    """Tokens after the first 32768 of the whole gather are 0."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = (part.copy() for part in oracle.gather_context(problem, batch, image))
        ckv[32768:], k_pe[32768:] = 0, 0
        return ckv, k_pe

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9")
def gathers_sum_the_lengths_of_two_tiles(oracle: Oracle) -> Oracle:
    """The place of a gathered row counts only the rows in its tile of 32 and the tile before."""

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
    """Return an oracle whose gather returns other tokens of a row.

    `change` takes the batch, the row and the indices of its tokens, and returns other indices.
    """

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Tokens:
        ckv, k_pe = oracle.gather_context(problem, batch, image)
        rows = np.split(np.arange(len(ckv)), np.cumsum(batch.seq_lens)[:-1])
        taken = [change(batch, row, tokens) for row, tokens in enumerate(rows) if len(tokens)]
        index = np.concatenate([np.zeros(0, np.int64), *taken])
        return ckv[index], k_pe[index]

    return replace(oracle, gather_context=gather)


@kernel_fault(FaultClass.TRUNCATED, "S-1", "S-9", through=_repeating)
def gathers_repeat_the_last_token_of_a_context(batch: Batch, row: int, tokens: Ints) -> Ints:
    """In rows of more than 58 new tokens, the gather repeats the last context token for them."""
    context = context_of(batch, row)
    long = batch.query_lens[row] > 58 and context
    return np.minimum(tokens, tokens[context - 1]) if long else tokens


@kernel_fault(FaultClass.EMPTY, "S-1", "S-9", through=_repeating)
def gathered_rows_without_queries_repeat_their_first_token(
    batch: Batch, row: int, tokens: Ints
) -> Ints:
    """In rows without queries, the gather repeats the first token."""
    return tokens if batch.query_lens[row] else np.full_like(tokens, tokens[0])


@kernel_fault(FaultClass.EMPTY, "S-1", "S-9", through=_repeating)
def gathered_rows_behind_an_empty_one_take_a_token(batch: Batch, row: int, tokens: Ints) -> Ints:
    """After a row without keys, the first gathered token of a row is the token before it."""
    if row and tokens[0] and not batch.seq_lens[row - 1]:
        tokens[0] -= 1
    return tokens
