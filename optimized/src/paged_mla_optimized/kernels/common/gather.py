"""Paged latents read back in row order, for the up-projection of long extends (S-1, S-9).

From FP8 caches they come as values, each rounded once (S-11).
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import decode, from_bfloat16_bits
from paged_mla_optimized.kernels.common.scales import load_row_scale, load_scales, scaled
from paged_mla_optimized.kernels.common.schedule import count_at_most


@triton.jit(do_not_specialize=["num_rows", "capacity", "stride_table_row"])
def gather_kernel(
    cache_ptr,  # [num_blocks, block_size, R + P], or bytes
    scales_ptr,  # float32 [] or [num_blocks, 1, G]
    block_table_ptr,  # int32 [B, M]
    key_starts_ptr,  # int32 [B + 2]
    ckv_ptr,  # out [K, R]
    k_pe_ptr,  # out [K, P]
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    stride_table_row,
    stride_table_col,
    stride_ckv,
    stride_k_pe,
    num_rows,
    capacity,  # K
    block_size,
    R: tl.constexpr,
    P: tl.constexpr,
    SCALES: tl.constexpr,  # where they lie, as MlaConfig.scales says
    SHARES: tl.constexpr,  # of a latent that have a scale each
    SEARCH_STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.load(key_starts_ptr + num_rows)
    if tl.program_id(0) * TOKENS >= total:
        return
    live = (at < total) & (at < capacity)
    row = tl.where(live, count_at_most(key_starts_ptr + 1, num_rows, at, SEARCH_STEPS), 0)
    key = at - tl.load(key_starts_ptr + row)
    entry = row.to(tl.int64) * stride_table_row
    entry += (key // block_size).to(tl.int64) * stride_table_col
    block = tl.load(block_table_ptr + entry, mask=live, other=0).to(tl.int64)
    place = (key % block_size).to(tl.int64)
    source = cache_ptr + block * stride_cache_block + place * stride_cache_token
    ckv_column, k_pe_column = tl.arange(0, R), tl.arange(0, P)
    ckv = tl.load(source[:, None] + ckv_column[None, :], mask=live[:, None])
    if SCALES == "inline":
        k_pe_at = (source + R + 4 * SHARES).to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        k_pe_at = source + R
    k_pe = tl.load(k_pe_at[:, None] + k_pe_column[None, :], mask=live[:, None])
    if SCALES != "none":
        dtype = ckv_ptr.dtype.element_ty
        if SCALES == "inline":
            share = tl.arange(0, SHARES)[None, :]
            scale = load_row_scale(source[:, None], share, live[:, None], R)[:, :, None]
            ckv = tl.reshape(ckv, [TOKENS, SHARES, R // SHARES])
            k_pe = from_bfloat16_bits(k_pe, dtype)
        else:
            scale = load_scales(
                scales_ptr, block, place, stride_scales_block, block_size, live, SCALES
            )
            scale = scale[:, None] if SCALES != "scalar" else scale
            k_pe = scaled(decode(k_pe, tl.float32, NATIVE), scale, dtype)
        ckv = tl.reshape(scaled(decode(ckv, tl.float32, NATIVE), scale, dtype), [TOKENS, R])
    target = ckv_ptr + at.to(tl.int64)[:, None] * stride_ckv + ckv_column[None, :]
    tl.store(target, ckv, mask=live[:, None])
    target = k_pe_ptr + at.to(tl.int64)[:, None] * stride_k_pe + k_pe_column[None, :]
    tl.store(target, k_pe, mask=live[:, None])
