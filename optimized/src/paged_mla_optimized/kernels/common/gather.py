"""Paged latents read back in row order, for the up-projection of long extends (S-1, S-9)."""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.schedule import count_at_most


@triton.jit(do_not_specialize=["num_rows", "capacity", "stride_table_row"])
def gather_kernel(
    cache_ptr,  # [num_blocks, block_size, R + P]
    block_table_ptr,  # int32 [B, M]
    key_starts_ptr,  # int32 [B + 2]
    ckv_ptr,  # out [K, R]
    k_pe_ptr,  # out [K, P]
    stride_cache_block,
    stride_cache_token,
    stride_table_row,
    stride_table_col,
    stride_ckv,
    stride_k_pe,
    num_rows,
    capacity,  # K
    block_size,
    R: tl.constexpr,
    P: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    TOKENS: tl.constexpr,
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
    source = cache_ptr + block * stride_cache_block
    source += (key % block_size).to(tl.int64) * stride_cache_token
    column = tl.arange(0, R)
    ckv = tl.load(source[:, None] + column[None, :], mask=live[:, None])
    target = ckv_ptr + at.to(tl.int64)[:, None] * stride_ckv + column[None, :]
    tl.store(target, ckv, mask=live[:, None])
    column = tl.arange(0, P)
    k_pe = tl.load(source[:, None] + R + column[None, :], mask=live[:, None])
    target = k_pe_ptr + at.to(tl.int64)[:, None] * stride_k_pe + column[None, :]
    tl.store(target, k_pe, mask=live[:, None])
