"""Faults of scales and codes in 8-bit caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import answering, slots_to_write, with_batch
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules import fp8
from paged_mla_reference.rules.e4m3 import LARGEST, decode, encode
from paged_mla_reference.rules.fp8 import to_float32
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_shared.formats import ScaleTensor
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

Scales = NDArray[np.float32]

WRITTEN = ("S-11", "S-10")
READ = ("S-11", "S-5", "S-7", "S-9", "S-1")  # S-1 is the rule by which gathers detect it


def _seen(oracle: Oracle, change: Callable[[CacheImage], CacheImage]) -> Oracle:
    """Return an oracle whose attention and gathers read a changed cache."""
    return replace(
        oracle,
        attend=lambda p, b, image: oracle.attend(p, b, change(image)),
        gather_context=lambda p, b, image: oracle.gather_context(p, b, change(image)),
    )


def _with_scales(
    image: CacheImage, inline: Callable[[Scales], Scales], beside: Callable[[Scales], Scales]
) -> CacheImage:
    """Return a cache with other scales, [blocks, .., scales].

    `inline` changes the scales inside rows; `beside` changes the separate scales of blocks.
    """
    layout, blocks = image.layout, image.blocks.copy()
    if layout.format.inline_scales:
        scales = layout.field(blocks, "ckv_scale")
        scales[...] = inline(scales.copy())
    scales = layout.scales(blocks)
    scales[...] = beside(scales.copy())
    return replace(image, blocks=blocks)


def _as_they_are(scales: Scales) -> Scales:
    return scales


def _storing(oracle: Oracle, name: str, value: Any) -> Oracle:
    """Return an oracle whose appends use `value` as the function `name` of :mod:`fp8`."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        with patched((fp8, name, value)):
            return oracle.append(problem, batch, image)

    return replace(oracle, append=append)


def _with_layer_scale(image: CacheImage, scale: float) -> CacheImage:
    return replace(image, layout=replace(image.layout, scale=scale))


def flushed(x: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as float32; subnormal numbers become 0."""
    numbers = to_float32(x)
    return np.where(np.abs(numbers) < fp8.SMALLEST_SCALE, np.copysign(0, numbers), numbers)


def _is_flat(problem: Problem) -> bool:
    """Return whether the cache format has one scale for the layer."""
    return problem.layout.format.scale_tensor is ScaleTensor.SCALAR


@kernel_fault(FaultClass.SCALE, *READ, cites="sglang@triton_backend sglang#18882")
def k_scale_needs_a_v_scale(oracle: Oracle) -> Oracle:
    """The layer's scale is not applied when the cache is read."""
    return _seen(oracle, lambda image: _with_layer_scale(image, 1.0))


@kernel_fault(FaultClass.SCALE, *WRITTEN, cites="sglang#34765 local-inference-lab/vllm#95")
def the_writer_takes_a_unit_scale(oracle: Oracle) -> Oracle:
    """The layer's scale is not applied when the cache is written."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        written = oracle.append(problem, batch, _with_layer_scale(image, 1.0))
        return replace(written, layout=image.layout)

    return replace(oracle, append=append)


@kernel_fault(FaultClass.SCALE, *READ, akin="maxtext#3138")
def the_layers_scale_is_applied_twice(oracle: Oracle) -> Oracle:
    """The layer's scale is applied twice when the cache is read."""
    return _seen(oracle, lambda image: _with_layer_scale(image, image.layout.scale**2))


@kernel_fault(FaultClass.SCALE, *READ, cites="vllm#42580", through=with_batch)
def fp8_query_drops_the_k_scale(problem: Problem, batch: Batch) -> Batch:
    """The layer's scale is applied to values but not to keys."""
    if not _is_flat(problem):
        return batch
    names = ("q_nope", "q_pe")
    unscaled = {name: widen(getattr(batch, name)) / problem.cache_scale for name in names}
    return replace(batch, **{n: round_to(x, problem.dtype) for n, x in unscaled.items()})


@kernel_fault(FaultClass.SCALE, *READ, cites="vllm#37054", through=answering)
def values_take_no_scale(problem: Problem, _: Batch, answer: Output) -> Output:
    """The layer's scale is applied to keys but not to values."""
    scale = problem.cache_scale if _is_flat(problem) else 1.0
    return replace(answer, out=answer.out / answer.out.dtype.type(scale))


@kernel_fault(FaultClass.SCALE, *READ, akin="vllm#37054", through=with_batch)
def rotated_keys_are_read_unscaled(problem: Problem, batch: Batch) -> Batch:
    """In scores, the layer's scale is applied to latents but not to rotated keys."""
    scale = problem.cache_scale if _is_flat(problem) else 1.0
    return replace(batch, q_pe=round_to(widen(batch.q_pe) / scale, problem.dtype))


@kernel_fault(FaultClass.SCALE, *WRITTEN, cites="vllm#42956")
def scales_are_those_of_the_latents(oracle: Oracle) -> Oracle:
    """A token's scale ignores the rotated part of its key, which can saturate."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        right, width = fp8.scale_of, problem.dims.cached_dim
        rank = problem.dims.kv_lora_rank

        def scale_of(x: Scales) -> Scales:
            return right(x[:, :rank] if x.shape[-1] == width else x)

        with patched((fp8, "scale_of", scale_of)):
            return oracle.append(problem, batch, image)

    return replace(oracle, append=append)


@kernel_fault(FaultClass.SCALE, *WRITTEN, cites="mlxcel#717", akin="local-inference-lab/b12x#86")
def scales_have_a_floor(oracle: Oracle) -> Oracle:
    """Scales below 1/16 are raised to 1/16, so that small numbers lose precision or become 0."""
    right = fp8.scale_of
    return _storing(oracle, "scale_of", lambda x: np.maximum(right(x), np.float32(1 / 16)))


@kernel_fault(FaultClass.SCALE, *WRITTEN, akin="mlxcel#717")
def scales_have_a_small_floor(oracle: Oracle) -> Oracle:
    """Scales below 1e-12 are raised to 1e-12, to avoid a division by zero."""
    right = fp8.scale_of
    return _storing(oracle, "scale_of", lambda x: np.maximum(right(x), np.float32(1e-12)))


@kernel_fault(FaultClass.SCALE, *WRITTEN)
def zeros_take_a_unit_scale(oracle: Oracle) -> Oracle:
    """Data that are all zero get a scale of 1."""
    right = fp8.scale_of

    def scale_of(x: Scales) -> Scales:
        return np.where(np.any(x, axis=-1), right(x), np.float32(1))

    return _storing(oracle, "scale_of", scale_of)


@kernel_fault(FaultClass.PRECISION, *WRITTEN)
def subnormal_numbers_are_flushed(oracle: Oracle) -> Oracle:
    """Subnormal numbers, below 2^-126, are stored as zeros."""
    return _storing(oracle, "to_float32", flushed)


@kernel_fault(FaultClass.SCALE, *WRITTEN, akin="vllm#49435")
def scales_are_written_as_powers_of_two(oracle: Oracle) -> Oracle:
    """Scales are rounded up to powers of two, also in formats that do not specify it."""
    right = fp8.scale_of
    return _storing(oracle, "scale_of", lambda x: np.exp2(np.ceil(np.log2(right(x)))))


@kernel_fault(FaultClass.SCALE, *READ, cites="FlashMLA#184 vllm#54563")
def scales_lose_their_mantissa(oracle: Oracle) -> Oracle:
    """Scales are read without their mantissas, as powers of two."""

    def exponent(scales: Scales) -> Scales:
        return np.asarray(scales.view(np.uint32) & 0xFF800000, np.uint32).view(np.float32)

    return _seen(oracle, lambda image: _with_scales(image, exponent, exponent))


@kernel_fault(FaultClass.STRIDE, *READ, cites="vllm#49716 vllm#50702", through=_seen)
def scales_take_computed_strides(image: CacheImage) -> CacheImage:
    """If blocks have gaps between them, a block is read with the scales of another block."""
    if not image.layout.block_padding:
        return image
    return _with_scales(image, _as_they_are, lambda scales: np.roll(scales, 1, axis=0))


@kernel_fault(FaultClass.STRIDE, *READ)
def one_inline_scale_serves_the_row(oracle: Oracle) -> Oracle:
    """All quarters of a latent are read with the scale of the first quarter."""
    return _seen(
        oracle, lambda image: _with_scales(image, lambda s: s[..., :1] + 0 * s, _as_they_are)
    )


@kernel_fault(FaultClass.STRIDE, *READ)
def inline_scales_are_read_one_late(oracle: Oracle) -> Oracle:
    """Each quarter of a latent is read with the scale of the next quarter."""
    return _seen(
        oracle, lambda image: _with_scales(image, lambda s: np.roll(s, -1, axis=-1), _as_they_are)
    )


def _per_group(change: Callable[[Scales], Scales]) -> Callable[[CacheImage], CacheImage]:
    """Return a change of the scales of formats with one scale for each quarter of a block."""

    def changed(image: CacheImage) -> CacheImage:
        grouped = image.layout.format.scale_tensor is ScaleTensor.PER_GROUP
        return _with_scales(image, _as_they_are, change) if grouped else image

    return changed


@kernel_fault(FaultClass.STRIDE, *READ)
def groups_take_the_scale_of_their_neighbour(oracle: Oracle) -> Oracle:
    """A group of tokens is read with the scale of the next group of its block."""
    return _seen(oracle, _per_group(lambda scales: np.roll(scales, -1, axis=1)))


@kernel_fault(FaultClass.STRIDE, *READ, akin="FastDeploy#7949")
def one_scale_serves_the_block(oracle: Oracle) -> Oracle:
    """A block is read with the scale of its first group."""
    return _seen(oracle, _per_group(lambda scales: np.repeat(scales[:, :1], 4, axis=1)))


def _unwritten_as_before(oracle: Oracle) -> Oracle:
    """Return an oracle whose append leaves the codes of other tokens unchanged."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        after, layout = oracle.append(problem, batch, image), image.layout
        slots = slots_to_write(oracle, problem, batch)
        blocks, before = after.blocks.copy(), image.read(after.block_ids)
        kept = ~np.isin(layout.slots(after.block_ids), slots[slots >= 0])
        layout.rows(blocks)[kept] = layout.rows(before)[kept]
        return replace(after, blocks=blocks)

    return replace(oracle, append=append)


@kernel_fault(FaultClass.WRITE, *WRITTEN, akin="FastDeploy#2975")
def grown_groups_are_not_requantized(oracle: Oracle) -> Oracle:
    """If a scale group's scale grows, the codes of its earlier tokens are not requantized."""
    return _unwritten_as_before(oracle)


@kernel_fault(FaultClass.WRITE, *WRITTEN, akin="FastDeploy#2975")
def the_last_append_sets_a_groups_scale(oracle: Oracle) -> Oracle:
    """A scale group gets the scale of the last append, even if that is smaller."""

    def append(problem: Problem, batch: Batch, image: CacheImage) -> CacheImage:
        forgotten = _per_group(np.zeros_like)(image)  # a scale of 0 never stays
        after = oracle.append(problem, batch, forgotten)
        scales = after.layout.scales(after.blocks)
        unset = scales == 0
        scales[unset] = image.layout.scales(image.read(after.block_ids))[unset]
        return after

    return replace(oracle, append=append)


@kernel_fault(FaultClass.RANGE, *WRITTEN, akin="vllm#42956")
def what_is_too_large_becomes_nan(oracle: Oracle) -> Oracle:
    """Numbers that are too large for e4m3 become NaN; they do not saturate."""

    def not_saturating(x: NDArray[Any]) -> NDArray[np.uint8]:
        return np.where(np.abs(x) > 464, np.uint8(0x7F), encode(x))

    return _storing(oracle, "encode", not_saturating)


@kernel_fault(FaultClass.PRECISION, *WRITTEN)
def codes_are_truncated(oracle: Oracle) -> Oracle:
    """Numbers are rounded to e4m3 toward zero."""

    def truncated(x: NDArray[Any]) -> NDArray[np.uint8]:
        code = encode(x)
        away = np.abs(decode(code)) > np.minimum(np.abs(x), LARGEST)
        return np.asarray(code - away, np.uint8)

    return _storing(oracle, "encode", truncated)


@kernel_fault(FaultClass.PRECISION, *WRITTEN)
def ties_are_rounded_away_from_zero(oracle: Oracle) -> Oracle:
    """Numbers halfway between two codes are rounded away from zero, not to even."""

    def away(x: NDArray[Any]) -> NDArray[np.uint8]:
        return encode(widen(x) * (1 + 2.0**-40))

    return _storing(oracle, "encode", away)


@kernel_fault(FaultClass.PRECISION, *WRITTEN)
def numbers_are_multiplied_by_a_reciprocal(oracle: Oracle) -> Oracle:
    """Numbers are multiplied by the rounded inverse of the scale, not divided by the scale."""

    def quantize(x: NDArray[np.float32], scale: Scales) -> NDArray[np.uint8]:
        with np.errstate(over="ignore", invalid="ignore"):
            return encode(x * (np.float32(1) / scale))

    return _storing(oracle, "quantize", quantize)


@kernel_fault(FaultClass.SCALE, *WRITTEN)
def groups_keep_what_is_below_their_first_named_token(oracle: Oracle) -> Oracle:
    """The first token of a scale group in the step is taken as the one with the lowest slot."""

    def first_of(places: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.int64]:
        return places[np.unique(group, return_index=True)[1]]

    return _storing(oracle, "lowest_of", first_of)
