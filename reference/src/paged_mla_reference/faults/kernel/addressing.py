"""Faults of addresses: offsets that wrap, strides that are ignored, slots that are wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    appending,
    seeing,
    with_batch,
    with_cache,
    writing,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.cache import copy_slots
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem


def _wrapped(problem: Problem, block_ids: NDArray[Any], bits: int, *, of_bytes: bool) -> Any:
    """Return the ids of the blocks that are found if offsets keep only `bits` low bits."""
    stride = problem.layout.block_stride
    if not of_bytes:
        stride //= numpy_dtype(problem.layout.format.ckv_dtype).itemsize
    ids = block_ids.astype(np.int64)
    return np.where(ids >= 0, ids * stride % 2**bits // stride, ids)


def wrapping(bits: int, *, of_bytes: bool = False) -> Callable[[Problem, Batch], Batch]:
    """Return a change of a batch after which offsets of its blocks keep only `bits` low bits."""

    def change(problem: Problem, batch: Batch) -> Batch:
        return replace(
            batch, block_table=_wrapped(problem, batch.block_table, bits, of_bytes=of_bytes)
        )

    return change


def _writing_wrapped(bits: int) -> Any:
    """Return a change of slots after which their element offsets keep only `bits` low bits."""

    def change(problem: Problem, _: Batch, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        block, index = np.divmod(slots, problem.block_size)
        landed = _wrapped(problem, block, bits, of_bytes=False) * problem.block_size + index
        return np.where(slots < 0, slots, landed)

    return change


@kernel_fault(
    FaultClass.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="vllm#47671 vllm#50427 sglang#9344"
)
def read_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """The kernel reads the cache with element offsets of only 31 bits."""
    return with_batch(oracle, wrapping(31))


@kernel_fault(FaultClass.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="flashinfer#3130")
def read_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """The kernel reads the cache with element offsets of only 32 bits."""
    return with_batch(oracle, wrapping(32))


@kernel_fault(FaultClass.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="FastDeploy@fc2c0046 aiter#2768")
def read_byte_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """The kernel reads the cache with byte offsets of only 32 bits."""
    return with_batch(oracle, wrapping(32, of_bytes=True))


@kernel_fault(FaultClass.OFFSET, "S-10", cites="tokenspeed#501 tokenspeed#748")
def write_offset_wraps_at_2_31(oracle: Oracle) -> Oracle:
    """The append writes the cache with element offsets of only 31 bits."""
    return writing(oracle, _writing_wrapped(31))


@kernel_fault(FaultClass.OFFSET, "S-10", cites="tokenspeed#501 flashinfer#3130")
def write_offset_wraps_at_2_32(oracle: Oracle) -> Oracle:
    """The append writes the cache with element offsets of only 32 bits."""
    return writing(oracle, _writing_wrapped(32))


def _named(
    oracle: Oracle, change: Callable[[Problem, Batch, NDArray[np.int64]], NDArray[np.int64]]
) -> Oracle:
    """Return an oracle whose append changes the slots of slot_mapping, but no derived slots."""

    def other_slots(problem: Problem, batch: Batch) -> Batch:
        if batch.slot_mapping is None:
            return batch
        return replace(batch, slot_mapping=change(problem, batch, batch.slot_mapping))

    return appending(oracle, other_slots)


@kernel_fault(FaultClass.OFFSET, "S-10", cites="tokenspeed#748 vllm#1486")
def named_slot_offsets_wrap_at_2_31(oracle: Oracle) -> Oracle:
    """Writes to the slots of slot_mapping use element offsets of only 31 bits."""
    return _named(oracle, _writing_wrapped(31))


@kernel_fault(FaultClass.OFFSET, "S-10", akin="local-inference-lab/b12x#40")
def named_slots_pass_through_float32(oracle: Oracle) -> Oracle:
    """Slots of slot_mapping pass through float32, so that slots above 2^24 are rounded."""
    return _named(oracle, lambda _p, _b, slots: slots.astype(np.float32).astype(np.int64))


@kernel_fault(FaultClass.OFFSET, "S-10", cites="vllm-ascend#16775", through=_named)
def named_slots_are_read_in_halves(
    _p: Problem, _b: Batch, slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """slot_mapping is read as 32-bit numbers: each second number is the upper half of a slot."""
    return np.ascontiguousarray(slots).view(np.int32)[: len(slots)].astype(np.int64)


@kernel_fault(FaultClass.STRIDE, "S-10", through=_named)
def named_slots_are_taken_for_dense(
    problem: Problem, _: Batch, slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """slot_mapping is read as if it were contiguous: its stride is ignored."""
    return as_dense(slots).clip(-1, problem.num_blocks * problem.block_size - 1)


@kernel_fault(FaultClass.WRITE, "S-10", through=_named)
def named_slots_are_taken_for_a_run(
    _p: Problem, _b: Batch, slots: NDArray[np.int64]
) -> NDArray[np.int64]:
    """slot_mapping is treated as consecutive slots if its first and last slots would allow it."""
    run = slots[:1] + np.arange(len(slots))
    fits = len(run) and run[0] >= 0 and run[-1] == slots[-1]
    return run if fits else slots


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-9", "S-10")
def own_keys_are_read_from_named_slots(oracle: Oracle) -> Oracle:
    """Attention reads the step's own keys from the slots of slot_mapping, not of the table."""

    def change(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        if batch.slot_mapping is None:
            return image
        right = oracle.metadata(problem, batch).slot_mapping
        moved = (batch.slot_mapping >= 0) & (right >= 0)
        return copy_slots(image, batch.slot_mapping[moved], right[moved])

    return with_cache(oracle, change)


def _keeping_bits(oracle: Oracle, bits: int) -> Oracle:
    """Return an oracle whose attention keeps only `bits` low bits of block ids."""
    return with_batch(oracle, lambda _, b: replace(b, block_table=b.block_table & (2**bits - 1)))


@kernel_fault(FaultClass.OFFSET, "S-1", "S-5", "S-7", "S-9", akin="vllm-ascend#16490")
def block_ids_keep_16_bits(oracle: Oracle) -> Oracle:
    """The kernel keeps only the lowest 16 bits of a block id."""
    return _keeping_bits(oracle, 16)


@kernel_fault(
    FaultClass.OFFSET, "S-1", "S-5", "S-7", "S-9", cites="aiter#4341 aiter#4351 aiter#4452"
)
def block_ids_keep_24_bits(oracle: Oracle) -> Oracle:
    """The kernel keeps only the lowest 24 bits of a block id."""
    return _keeping_bits(oracle, 24)


@kernel_fault(
    FaultClass.OFFSET, "S-1", "S-4", "S-5", "S-6", "S-7", cites="vllm-ascend#16490", through=seeing
)
def blocks_past_2_16_are_not_read(
    problem: Problem, batch: Batch, row: int, seen: NDArray[np.bool_]
) -> Any:
    """The kernel does not read blocks whose ids are 65536 or more."""
    ids = np.repeat(batch.block_table[row], problem.block_size)
    return seen & (ids[: seen.shape[1]] < 2**16)


def _every_block(image: CacheImage) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the whole storage, uint8 [storage_bytes], and every block's scales as bytes."""
    blocks = image.read(np.arange(image.layout.num_blocks, dtype=np.int64))
    stride = image.layout.block_stride
    return blocks[:, :stride].ravel(), blocks[:, stride:]


def _seen_with(image: CacheImage, token_padding: int, block_padding: int) -> CacheImage:
    """Return a cache of the same bytes with other strides."""
    layout = replace(image.layout, token_padding=token_padding, block_padding=block_padding)
    if layout == image.layout:
        return image
    storage, scales = _every_block(image)
    blocks = storage[: layout.storage_bytes].reshape(layout.num_blocks, -1)
    ids = np.arange(layout.num_blocks, dtype=np.int64)
    return CacheImage(layout, ids, np.hstack([blocks, scales]), image.poison)


def _dense_tokens(image: CacheImage) -> CacheImage:
    """Return a cache of the same bytes whose tokens are contiguous in each block."""
    layout = image.layout
    slack = layout.block_stride - layout.block_size * layout.token_bytes
    return _seen_with(image, 0, slack)


@kernel_fault(FaultClass.STRIDE, "S-5", "S-9", cites="vllm#37032 vllm#37090 vllm#45111")
def block_stride_is_computed(oracle: Oracle) -> Oracle:
    """The kernel ignores the stride of blocks and reads them as if they were contiguous."""
    return with_cache(
        oracle, lambda _p, _b, image: _seen_with(image, image.layout.token_padding, 0)
    )


@kernel_fault(FaultClass.STRIDE, "S-5", "S-9", cites="flashinfer@07f9c33a2")
def token_stride_is_computed(oracle: Oracle) -> Oracle:
    """The kernel ignores the stride of tokens and reads them as if they were contiguous."""
    return with_cache(oracle, lambda _p, _b, image: _dense_tokens(image))


@kernel_fault(FaultClass.STRIDE, "S-10", cites="aiter#3498 vllm#48379")
def write_strides_are_computed(oracle: Oracle) -> Oracle:
    """The append ignores the strides of tokens and blocks, as if there were no gaps."""

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
    """Return the array that is read if only the first address and the shape are used."""
    strides = [view.itemsize]
    for size in view.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return np.lib.stride_tricks.as_strided(view, view.shape, strides)


@kernel_fault(FaultClass.STRIDE, "S-5", "S-9", cites="vllm#43152")
def queries_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """The kernel ignores the strides of queries, as if they were contiguous."""
    return with_batch(
        oracle, lambda _, b: replace(b, q_nope=as_dense(b.q_nope), q_pe=as_dense(b.q_pe))
    )


@kernel_fault(FaultClass.STRIDE, "S-5", "S-9", through=with_batch)
def heads_of_queries_are_taken_for_dense(_: Problem, batch: Batch) -> Batch:
    """The kernel ignores the stride of q_nope's heads, as if each token were contiguous."""
    tokens = [as_dense(token) for token in batch.q_nope]
    return replace(batch, q_nope=np.stack(tokens)) if tokens else batch


@kernel_fault(FaultClass.STRIDE, "S-1", "S-4", "S-5", "S-7", "S-9", through=with_batch)
def lengths_are_taken_for_dense(_: Problem, batch: Batch) -> Batch:
    """The kernel ignores the stride of seq_lens, as if it were contiguous."""
    longest = batch.seq_lens.max(initial=0)
    return replace(batch, seq_lens=np.minimum(as_dense(batch.seq_lens), longest))


@kernel_fault(FaultClass.STRIDE, "S-4", "S-5", "S-7", "S-9", "S-14", through=with_batch)
def masks_are_taken_for_dense(_: Problem, batch: Batch) -> Batch:
    """The kernel ignores the strides of a mask, as if it were contiguous."""
    return batch if batch.mask is None else replace(batch, mask=as_dense(batch.mask))


@kernel_fault(FaultClass.STRIDE, "S-10", cites="vllm#43152")
def latents_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """The append ignores the strides of its latents, as if they were contiguous."""
    return appending(oracle, lambda _, b: replace(b, ckv=as_dense(b.ckv), k_pe=as_dense(b.k_pe)))


@kernel_fault(
    FaultClass.STRIDE, "S-10", cites="flashinfer@fp8-kpe-row-aliasing-test", through=appending
)
def k_pe_takes_the_stride_of_ckv(problem: Problem, batch: Batch) -> Batch:
    """The append reads rows of k_pe with the stride of ckv."""
    ratio = problem.dims.kv_lora_rank // problem.dims.qk_rope_head_dim
    rows = np.arange(batch.num_tokens) * ratio % max(batch.num_tokens, 1)
    return replace(batch, k_pe=batch.k_pe[rows])
