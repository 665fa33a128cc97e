"""Wrong addresses: offsets that wrap, strides that are assumed, pages that are mistaken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.deviations.change import (
    appending,
    imagined,
    posed,
    reading,
    seeing,
    wide_table,
    with_columns,
    writing,
)
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.paging import blocks_of
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem


def _wrapped(problem: Problem, block_ids: NDArray[Any], bits: int, *, of_bytes: bool) -> Any:
    """Return where blocks seem to lie when their offset keeps only its low bits."""
    stride = problem.layout.block_stride
    if not of_bytes:
        stride //= numpy_dtype(problem.layout.format.ckv_dtype).itemsize
    ids = block_ids.astype(np.int64)
    return np.where(ids >= 0, ids * stride % 2**bits // stride, ids)


def _wrapping(bits: int, *, of_bytes: bool = False) -> Any:
    def change(problem: Problem, batch: Batch) -> Batch:
        return replace(
            batch, block_table=_wrapped(problem, batch.block_table, bits, of_bytes=of_bytes)
        )

    return change


def _writing_wrapped(bits: int) -> Any:
    def change(problem: Problem, _: Batch, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        block, index = np.divmod(slots, problem.block_size)
        landed = _wrapped(problem, block, bits, of_bytes=False) * problem.block_size + index
        return np.where(slots < 0, slots, landed)

    return change


@breaks(Fault.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="vllm#47671 vllm#50427 sglang#9344")
def read_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """Element offsets of reads keep 31 bits."""
    return reading(oracle, _wrapping(31))


@breaks(Fault.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="flashinfer#3130")
def read_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """Element offsets of reads keep 32 bits; caches between 2^31 and 2^32 are right."""
    return reading(oracle, _wrapping(32))


@breaks(Fault.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="FastDeploy@fc2c0046 aiter#2768")
def read_byte_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """Byte offsets of reads keep 32 bits."""
    return reading(oracle, _wrapping(32, of_bytes=True))


@breaks(Fault.OFFSET, "S-10", cites="tokenspeed#501 tokenspeed#748")
def write_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """Element offsets of cache writes keep 31 bits."""
    return writing(oracle, _writing_wrapped(31))


@breaks(Fault.OFFSET, "S-10", cites="tokenspeed#501 flashinfer#3130")
def write_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """Element offsets of cache writes keep 32 bits."""
    return writing(oracle, _writing_wrapped(32))


def _named(
    oracle: Oracle, change: Callable[[Problem, Batch, NDArray[np.int64]], NDArray[np.int64]]
) -> Oracle:
    """Change the slots that a batch names; derived ones stay right."""

    def other_slots(problem: Problem, batch: Batch) -> Batch:
        if batch.slot_mapping is None:
            return batch
        return replace(batch, slot_mapping=change(problem, batch, batch.slot_mapping))

    return appending(oracle, other_slots)


@breaks(Fault.OFFSET, "S-10", cites="tokenspeed#748 vllm#1486")
def named_slot_offsets_wrap_at_2_31(oracle: Oracle) -> Oracle:
    """Element offsets of named slots keep 31 bits; those of derived slots are right."""
    return _named(oracle, _writing_wrapped(31))


@breaks(Fault.OFFSET, "S-10", akin="local-inference-lab/b12x#40")
def named_slots_pass_through_float32(oracle: Oracle) -> Oracle:
    """Named slots past 2^24 are rounded to a multiple of 2, 4 and so on."""
    return _named(oracle, lambda _p, _b, slots: slots.astype(np.float32).astype(np.int64))


@breaks(Fault.OFFSET, "S-10", cites="vllm-ascend#16775")
def named_slots_are_read_in_halves(oracle: Oracle) -> Oracle:
    """Named slots are read as 32-bit numbers, so that every second one is the upper half."""

    def change(_p: Problem, _b: Batch, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.ascontiguousarray(slots).view(np.int32)[: len(slots)].astype(np.int64)

    return _named(oracle, change)


def _keeping_bits(oracle: Oracle, bits: int) -> Oracle:
    """Let reads find blocks by the low bits of their ids."""
    return reading(oracle, lambda _, b: replace(b, block_table=b.block_table & (2**bits - 1)))


@breaks(Fault.OFFSET, "S-1", "S-5", "S-7", "S-9", akin="vllm-ascend#16490")
def block_ids_keep_16_bits(oracle: Oracle) -> Oracle:
    """Block ids lose their bits from the 17th on."""
    return _keeping_bits(oracle, 16)


@breaks(Fault.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="aiter#4341 aiter#4351 aiter#4452")
def block_ids_keep_24_bits(oracle: Oracle) -> Oracle:
    """Block ids lose their bits from the 25th on."""
    return _keeping_bits(oracle, 24)


@breaks(Fault.OFFSET, "S-1", "S-4", "S-5", "S-6", "S-7", cites="vllm-ascend#16490")
def blocks_past_2_16_are_not_read(oracle: Oracle) -> Oracle:
    """Blocks whose id needs a 17th bit hold no visible key."""

    def change(problem: Problem, batch: Batch, row: int, seen: NDArray[np.bool_]) -> Any:
        ids = np.repeat(batch.block_table[row], problem.block_size)
        return seen & (ids[: seen.shape[1]] < 2**16)

    return seeing(oracle, change)


@breaks(Fault.OFFSET, "S-1", "S-9", cites="vllm#50427")
def gather_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """Element offsets of gathered context keep 31 bits."""
    wrap = _wrapping(31)
    return replace(
        oracle,
        gather_context=lambda problem, batch, image: oracle.gather_context(
            problem, wrap(problem, batch), image
        ),
    )


def _every_block(image: CacheImage) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the whole storage, uint8 [storage_bytes], and every block's scales as bytes."""
    blocks = image.read(np.arange(image.layout.num_blocks, dtype=np.int64))
    stride = image.layout.block_stride
    return blocks[:, :stride].ravel(), blocks[:, stride:]


def _seen_with(image: CacheImage, token_padding: int, block_padding: int) -> CacheImage:
    """Return the same bytes under other strides."""
    layout = replace(image.layout, token_padding=token_padding, block_padding=block_padding)
    if layout == image.layout:
        return image
    storage, scales = _every_block(image)
    blocks = storage[: layout.storage_bytes].reshape(layout.num_blocks, -1)
    ids = np.arange(layout.num_blocks, dtype=np.int64)
    return CacheImage(layout, ids, np.hstack([blocks, scales]), image.poison)


def _dense_tokens(image: CacheImage) -> CacheImage:
    layout = image.layout
    slack = layout.block_stride - layout.block_size * layout.token_bytes
    return _seen_with(image, 0, slack)


@breaks(Fault.STRIDE, "S-5", "S-9", cites="vllm#37032 vllm#37090 vllm#45111")
def block_stride_is_computed(oracle: Oracle) -> Oracle:
    """Reads take blocks to be as far apart as they are long."""
    return imagined(oracle, lambda _p, _b, image: _seen_with(image, image.layout.token_padding, 0))


@breaks(Fault.STRIDE, "S-5", "S-9", cites="flashinfer@07f9c33a2")
def token_stride_is_computed(oracle: Oracle) -> Oracle:
    """Reads take tokens to be as far apart as they are long."""
    return imagined(oracle, lambda _p, _b, image: _dense_tokens(image))


@breaks(Fault.STRIDE, "S-10", cites="aiter#3498 vllm#48379")
def write_strides_are_computed(oracle: Oracle) -> Oracle:
    """Writes ignore the gaps between tokens and between blocks."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        dense = oracle.append(problem, batch, _seen_with(image, 0, 0))
        if dense.layout == image.layout:
            return dense
        (storage, _), (written, scales) = _every_block(image), _every_block(dense)
        storage[: len(written)] = written
        blocks = np.hstack([storage.reshape(image.layout.num_blocks, -1), scales])
        return replace(image, block_ids=np.arange(len(blocks), dtype=np.int64), blocks=blocks)

    return replace(oracle, append=append)


def as_dense(view: NDArray[Any]) -> NDArray[Any]:
    """Return what a reader finds that knows only the first address and the shape."""
    strides = [view.itemsize]
    for size in view.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return np.lib.stride_tricks.as_strided(view, view.shape, strides)


@breaks(Fault.STRIDE, "S-1", "S-5", "S-7", "S-9", cites="rtp-llm#1258")
def table_is_taken_for_dense(oracle: Oracle) -> Oracle:
    """The block table is read by its shape, not by its strides."""
    return reading(oracle, lambda _, b: replace(b, block_table=as_dense(b.block_table)))


@breaks(Fault.STRIDE, "S-5", "S-9", cites="vllm#43152")
def queries_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """Queries are read by their shape, not by their strides."""
    return reading(
        oracle, lambda _, b: replace(b, q_nope=as_dense(b.q_nope), q_pe=as_dense(b.q_pe))
    )


@breaks(Fault.STRIDE, "S-1", "S-4", "S-5", "S-7", "S-9")
def lengths_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """Lengths of rows are read by their shape; what lies between them ends with the longest."""

    def change(_: Problem, batch: Batch) -> Batch:
        longest = batch.seq_lens.max(initial=0)
        return replace(batch, seq_lens=np.minimum(as_dense(batch.seq_lens), longest))

    return reading(oracle, change)


@breaks(Fault.STRIDE, "S-4", "S-5", "S-7", "S-9", "S-14")
def masks_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """A mask is read by its shape, not by its strides."""

    def change(_: Problem, batch: Batch) -> Batch:
        return batch if batch.mask is None else replace(batch, mask=as_dense(batch.mask))

    return reading(oracle, change)


@breaks(Fault.STRIDE, "S-10", cites="vllm#43152")
def latents_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """Latents to be written are read by their shape, not by their strides."""
    return appending(oracle, lambda _, b: replace(b, ckv=as_dense(b.ckv), k_pe=as_dense(b.k_pe)))


@breaks(Fault.STRIDE, "S-10", cites="flashinfer@fp8-kpe-row-aliasing-test")
def k_pe_takes_the_stride_of_ckv(oracle: Oracle) -> Oracle:
    """Rows of k_pe are found with the stride of ckv, so that later ones come again."""

    def change(problem: Problem, batch: Batch) -> Batch:
        ratio = problem.dims.kv_lora_rank // problem.dims.qk_rope_head_dim
        rows = np.arange(batch.num_tokens) * ratio % max(batch.num_tokens, 1)
        return replace(batch, k_pe=batch.k_pe[rows])

    return appending(oracle, change)


@breaks(Fault.STRIDE, "S-1", "S-5", "S-7", "S-9", cites="cutlass#2221")
def table_width_is_the_longest_row(oracle: Oracle) -> Oracle:
    """Rows of the table are taken to be as wide as the longest row needs."""

    def change(problem: Problem, batch: Batch) -> Batch:
        used = blocks_of(int(batch.seq_lens.max(initial=0)), problem.block_size)
        flat = np.ascontiguousarray(batch.block_table).ravel()[: used * batch.num_rows]
        return replace(batch, block_table=flat.reshape(batch.num_rows, used))

    return reading(oracle, change)


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-9", cites="flashinfer#3219")
def blocks_are_taken_for_consecutive(oracle: Oracle) -> Oracle:
    """A row's blocks are taken to follow its first one."""

    def change(_: Problem, batch: Batch) -> Batch:
        steps = np.arange(batch.block_table.shape[1], dtype=np.int64)
        return replace(batch, block_table=batch.block_table[:, :1].astype(np.int64) + steps)

    return reading(oracle, change)


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-9", cites="sglang@KNOWN_FAILURES")
def blocks_are_sorted(oracle: Oracle) -> Oracle:
    """A row's blocks are read in ascending order."""

    def change(problem: Problem, batch: Batch) -> Batch:
        table = batch.block_table.copy()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            table[row, : blocks_of(seq_len, problem.block_size)].sort()
        return replace(batch, block_table=table)

    return reading(oracle, change)


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-9", cites="FastDeploy#7727 aiter#4365")
def block_size_falls_back_to_64(oracle: Oracle) -> Oracle:
    """Reads find slots as if a block held 64 tokens."""
    widened = reading(oracle, lambda problem, batch: wide_table(batch, 1, problem.max_model_len))
    return posed(widened, lambda problem: replace(problem, block_size=64))


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-9", cites="aiter#2996 aiter#3095")
def table_entries_are_taken_for_slots(oracle: Oracle) -> Oracle:
    """The table is read as if a block held one token."""
    widened = reading(oracle, lambda problem, batch: wide_table(batch, 1, problem.max_model_len))
    return posed(widened, lambda problem: replace(problem, block_size=1))


@breaks(Fault.PAGE, "S-4", "S-5", "S-7", "S-9", cites="flashinfer#4347")
def only_128_tokens_of_a_block_are_read(oracle: Oracle) -> Oracle:
    """Blocks of more than 128 tokens lose the others."""

    def change(problem: Problem, _b: Batch, _r: int, seen: NDArray[np.bool_]) -> Any:
        return seen & (np.arange(seen.shape[1]) % problem.block_size < 128)

    return seeing(oracle, change)


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-9", cites="flashinfer#3022 flashinfer#810")
def small_blocks_are_read_from_the_next(oracle: Oracle) -> Oracle:
    """Blocks below 64 tokens are fetched one table entry late."""

    def change(problem: Problem, batch: Batch) -> Batch:
        late = np.roll(batch.block_table, -1, axis=1)
        return batch if problem.block_size >= 64 else replace(batch, block_table=late)

    return reading(oracle, change)


@breaks(Fault.TABLE_TAIL, "S-5", "S-9", cites="vllm#27909 vllm#45380 pegainfer#291")
def next_block_is_read_too(oracle: Oracle) -> Oracle:
    """The table entry past a row's last block is read, and its tokens with it."""

    def change(problem: Problem, batch: Batch, row: int, seen: NDArray[np.bool_]) -> Any:
        if not batch.seq_lens[row]:
            return seen
        blocks = blocks_of(int(batch.seq_lens[row]), problem.block_size) + 1
        return with_columns(seen, blocks * problem.block_size)

    return seeing(oracle, change)


@breaks(Fault.TABLE_TAIL, "S-1", "S-9", cites="vllm#27909 vllm#45537 vllm#49427")
def gather_reads_every_table_entry(oracle: Oracle) -> Oracle:
    """Gathered context takes its last block from the end of the table."""

    def gather(problem: Problem, batch: Batch, image: CacheImage) -> Any:
        table = batch.block_table.copy()
        for row, seq_len in enumerate(batch.seq_lens.tolist()):
            if seq_len:
                table[row, blocks_of(seq_len, problem.block_size) - 1] = table[row, -1]
        return oracle.gather_context(problem, replace(batch, block_table=table), image)

    return replace(oracle, gather_context=gather)


@breaks(Fault.TABLE_TAIL, "S-6", "S-9", "S-5", cites="vllm#35969")
def padded_row_reads_the_row_before(oracle: Oracle) -> Oracle:
    """A padded row takes block -1, the last entry of the row before, and one of its tokens."""

    def change(problem: Problem, batch: Batch) -> Batch:
        padded = batch.seq_lens == 0
        if not padded.any() or padded.all():
            return batch
        table, before = batch.block_table.copy(), np.flatnonzero(~padded)[0]
        table[padded] = batch.block_table[before]
        lengths = np.where(padded, np.maximum(batch.query_lens, 1), batch.seq_lens)
        widened = replace(batch, block_table=table, seq_lens=lengths.astype(np.int32))
        return wide_table(widened, problem.block_size, int(lengths.max()))

    return reading(oracle, change)
