"""Write the latents and rotated keys of a step as e4m3 (rules S-10 to S-12).

``append_fp8_kernel`` serves caches with one scale for the layer, and caches whose rows contain
scales ("inline"). Such a row has R codes of the latent, SHARES float32 scales, one for each scale
group of R / SHARES latent columns, and P bfloat16 numbers of the key with position. Each program
writes TOKENS tokens, and none to slots outside the cache or to `reserved_slot`. No program depends
on another. The kernels for other formats use the functions of this module.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import bfloat16_bits, encode
from paged_mla_optimized.kernels.common.rope import load_halves, store_halves
from paged_mla_optimized.kernels.common.scales import (
    magnitude_of,
    order_of,
    quotient,
    scale_of,
)


class Source(NamedTuple):
    """The latents and keys of a step, and the tables that rotate the keys."""

    ckv_ptr: tl.tensor  # [T, R]
    k_pe_ptr: tl.tensor  # [T, P]
    positions_ptr: tl.tensor  # int64 [T]
    cos_ptr: tl.tensor  # [max_model_len, P / 2]; read only with a rope
    sin_ptr: tl.tensor  # [max_model_len, P / 2]; read only with a rope
    stride_ckv: tl.tensor
    stride_k_pe: tl.tensor


@triton.jit
def is_in_cache(slot, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Return whether `slot` is a slot of the cache."""
    return (slot >= 0) & (slot // BLOCK_SIZE < num_blocks)


@triton.jit
def load_slots(
    slot_mapping_ptr, stride_slots, token, is_token, num_blocks, reserved_slot,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Load the slot of each token (int64); -1 for tokens that the kernel must not write."""
    slot = tl.load(slot_mapping_ptr + token * stride_slots, mask=is_token, other=-1)
    is_written = is_in_cache(slot, num_blocks, BLOCK_SIZE) & (slot != reserved_slot)
    return tl.where(is_written, slot, -1)


@triton.jit
def load_tokens(source, token, wanted, R: tl.constexpr, P: tl.constexpr, ROPE: tl.constexpr):
    """Load the latents [ROWS, R] of tokens, and both halves of their rotated keys.

    The latents of tokens that are not `wanted` are 0; their keys are undefined.
    """
    ckv_at = source.ckv_ptr + token[:, None] * source.stride_ckv + tl.arange(0, R)[None, :]
    ckv = tl.load(ckv_at, mask=wanted[:, None], other=0.0)
    position = tl.load(source.positions_ptr + token, mask=wanted, other=0)
    k_pe_at = source.k_pe_ptr + token * source.stride_k_pe
    first, second = load_halves(k_pe_at, position, wanted, source.cos_ptr, source.sin_ptr, P, ROPE)
    return ckv, first, second


@triton.jit
def store_tokens(
    row_ptr, ckv, first, second, scale, live, R: tl.constexpr, P: tl.constexpr,
    ROPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store the codes of live latents [ROWS, R] and of both halves of their keys.

    `scale` is a scalar, or one number for each token [ROWS, 1].
    """
    codes = encode(quotient(ckv, scale, NATIVE, False), NATIVE)
    tl.store(row_ptr[:, None] + tl.arange(0, R)[None, :], codes, mask=live[:, None])
    first = encode(quotient(first, scale, NATIVE, False), NATIVE)
    second = encode(quotient(second, scale, NATIVE, False), NATIVE)
    store_halves(row_ptr + R, first, second, live, P, ROPE)


@triton.jit(
    do_not_specialize=["num_tokens", "num_blocks", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_fp8_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, BLOCK_SIZE, width]
    scales_ptr,  # float32 []; read if SCALES is "scalar"
    slot_mapping_ptr,  # int64 [T]
    positions_ptr,  # int64 [T]
    cos_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    sin_ptr,  # [max_model_len, P / 2]; read if ROPE is not "none"
    stride_ckv,
    stride_k_pe,
    stride_slots,
    stride_cache_block,
    stride_cache_token,
    num_tokens,
    num_blocks,
    reserved_slot,  # the slot that the kernel never writes; -1 if there is none
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
    SCALES: tl.constexpr,  # "scalar" or "inline"
    SHARES: tl.constexpr,  # scale groups of a latent
    BLOCK_SIZE: tl.constexpr,
    TOKENS: tl.constexpr,  # tokens of a program
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < num_tokens
    slot = load_slots(
        slot_mapping_ptr, stride_slots, token, is_token, num_blocks, reserved_slot, BLOCK_SIZE
    )
    source = Source(ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe)
    # These loads do not depend on the slots, so they do not wait for them.
    ckv, first, second = load_tokens(source, token, is_token, R, P, ROPE)
    live = slot >= 0
    block, place = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    row = cache_ptr + block * stride_cache_block + place * stride_cache_token
    if SCALES == "inline":
        shares = tl.reshape(ckv, [TOKENS, SHARES, R // SHARES])
        scale = scale_of(magnitude_of(tl.max(order_of(shares), axis=2)))
        codes = encode(quotient(shares, scale[:, :, None], NATIVE, False), NATIVE)
        codes = tl.reshape(codes, [TOKENS, R])
        tl.store(row[:, None] + tl.arange(0, R)[None, :], codes, mask=live[:, None])
        at = (row + R).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(at[:, None] + tl.arange(0, SHARES)[None, :], scale, mask=live[:, None])
        at = (row + R + 4 * SHARES).to(tl.pointer_type(tl.int16), bitcast=True)
        first, second = bfloat16_bits(first), bfloat16_bits(second)
        store_halves(at, first, second, live, P, ROPE)
    else:
        scale = tl.load(scales_ptr)
        store_tokens(row, ckv, first, second, scale, live, R, P, ROPE, NATIVE)
