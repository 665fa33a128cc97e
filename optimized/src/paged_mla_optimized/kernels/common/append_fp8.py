"""Paged scatter of this step's latents and keys as e4m3 (rules S-10 to S-12)."""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import bfloat16_bits, encode
from paged_mla_optimized.kernels.common.rope import load_halves, store_halves
from paged_mla_optimized.kernels.common.scales import finite_magnitude, largest_of, scale_of


@triton.jit
def load_tokens(
    ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe, token, live,
    R: tl.constexpr, P: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Load float32 latents and halves of rotated keys; of dead tokens, anything for keys."""
    source = ckv_ptr + token[:, None] * stride_ckv + tl.arange(0, R)[None, :]
    ckv = tl.load(source, mask=live[:, None], other=0.0).to(tl.float32)
    position = tl.load(positions_ptr + token, mask=live, other=0)
    source = k_pe_ptr + token * stride_k_pe
    first, second = load_halves(source, position, live, cos_ptr, sin_ptr, P, ROPE)
    return ckv, first, second


@triton.jit
def store_tokens(
    row_ptr, ckv, first, second, scale, live, R: tl.constexpr, P: tl.constexpr,
    ROPE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Store float32 latents [ROWS, R] and halves of keys, over `scale` [ROWS, 1] or one of all."""
    codes = encode(tl.div_rn(ckv, scale), NATIVE)
    tl.store(row_ptr[:, None] + tl.arange(0, R)[None, :], codes, mask=live[:, None])
    first, second = (
        encode(tl.div_rn(first, scale), NATIVE),
        encode(tl.div_rn(second, scale), NATIVE),
    )
    store_halves(row_ptr + R, first, second, live, P, ROPE)


@triton.jit(
    do_not_specialize=["num_tokens", "reserved_slot"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def append_fp8_kernel(
    ckv_ptr,  # [T, R]
    k_pe_ptr,  # [T, P]
    cache_ptr,  # uint8 [num_blocks, block_size, width]
    scales_ptr,  # float32 [] or [num_blocks, 1, block_size]
    slot_mapping_ptr,  # int64 [T], negative: write nothing
    positions_ptr,  # int64 [T]
    cos_ptr,
    sin_ptr,
    stride_ckv,
    stride_k_pe,
    stride_slots,
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    num_tokens,
    block_size,
    reserved_slot,  # write nothing there either; -1 for none
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,
    SCALES: tl.constexpr,  # "scalar", "per_token" or "inline"
    SHARES: tl.constexpr,  # of a latent that have a scale each
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping_ptr + token * stride_slots, mask=token < num_tokens, other=-1)
    live = (slot >= 0) & (slot != reserved_slot)
    block, place = slot // block_size, slot % block_size
    row = cache_ptr + block * stride_cache_block + place * stride_cache_token
    ckv, first, second = load_tokens(
        ckv_ptr, k_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_ckv, stride_k_pe, token, live,
        R, P, ROPE,
    )  # fmt: skip
    if SCALES == "inline":
        shares = tl.reshape(ckv, [TOKENS, SHARES, R // SHARES])
        scale = scale_of(tl.max(finite_magnitude(shares), axis=2))
        codes = tl.reshape(encode(tl.div_rn(shares, scale[:, :, None]), NATIVE), [TOKENS, R])
        tl.store(row[:, None] + tl.arange(0, R)[None, :], codes, mask=live[:, None])
        at = (row + R).to(tl.pointer_type(tl.float32), bitcast=True)
        tl.store(at[:, None] + tl.arange(0, SHARES)[None, :], scale, mask=live[:, None])
        at = (row + R + 4 * SHARES).to(tl.pointer_type(tl.int16), bitcast=True)
        first, second = bfloat16_bits(first), bfloat16_bits(second)
        store_halves(at, first, second, live, P, ROPE)
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        if SCALES == "per_token":
            scale = scale_of(largest_of(ckv, first, second))
            at = scales_ptr + block * stride_scales_block + place
            tl.store(at, scale, mask=live)
        else:
            scale = tl.load(scales_ptr) + tl.zeros([TOKENS], tl.float32)
        store_tokens(row, ckv, first, second, scale[:, None], live, R, P, ROPE, NATIVE)
