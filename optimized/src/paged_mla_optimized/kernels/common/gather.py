"""Copy cached latents and keys to dense tensors in row order (rules S-1, S-9).

The up-projection of long extends reads the result. For FP8 caches the kernel multiplies codes by
their scales in float32, and rounds the products to the output type (S-11).

Each program copies TOKENS lines. Line `at` belongs to the row whose range of `key_starts` contains
it. Lines of keys in no valid block are zeros. Programs past the last line return at once.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import decode, from_bfloat16_bits
from paged_mla_optimized.kernels.common.scales import load_row_scale, load_scales
from paged_mla_optimized.kernels.common.schedule import count_at_most


@triton.jit(
    do_not_specialize=["num_rows", "capacity", "stride_table_row", "num_blocks"],
    do_not_specialize_on_alignment=[
        "scales_ptr",
        "block_table_ptr",
        "key_starts_ptr",
        "first_tokens_ptr",
    ],
)
def gather_kernel(
    cache_ptr,  # [num_blocks, block_size, R + P], or uint8 [num_blocks, block_size, bytes of a row]
    scales_ptr,  # float32 [] or [num_blocks, 1, G]
    block_table_ptr,  # int32 [B, M]
    key_starts_ptr,  # int32 [B + 1]: the lines of each row
    first_tokens_ptr,  # int32 [B]: the key on each row's first line
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
    num_blocks,
    block_size,
    R: tl.constexpr,
    P: tl.constexpr,
    SCALES: tl.constexpr,  # where the scales are stored: a value of MlaConfig.scales
    SHARES: tl.constexpr,  # scale groups of a latent
    SEARCH_STEPS: tl.constexpr,  # see ``count_at_most``
    TOKENS: tl.constexpr,  # lines of a program
    NATIVE: tl.constexpr,
):
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    total = tl.load(key_starts_ptr + num_rows)
    if tl.program_id(0) * TOKENS >= total:
        return
    live = (at < total) & (at < capacity)
    row = tl.where(live, count_at_most(key_starts_ptr + 1, num_rows, at, SEARCH_STEPS), 0)
    key = at - tl.load(key_starts_ptr + row) + tl.load(first_tokens_ptr + row)
    entry = row.to(tl.int64) * stride_table_row
    entry += (key // block_size).to(tl.int64) * stride_table_col
    block = tl.load(block_table_ptr + entry, mask=live, other=-1).to(tl.int64)
    is_cached = (block >= 0) & (block < num_blocks)  # other keys become zeros
    place = (key % block_size).to(tl.int64)
    source = cache_ptr + block * stride_cache_block + place * stride_cache_token
    dtype = ckv_ptr.dtype.element_ty
    if SCALES == "inline":
        share = tl.arange(0, SHARES)[None, :]
        scale = load_row_scale(source[:, None], share, is_cached[:, None], R)[:, :, None]
    elif SCALES != "none":
        scale = load_scales(
            scales_ptr, block, place, stride_scales_block, block_size, is_cached, SCALES
        )
        if SCALES != "scalar":
            scale = scale[:, None]
    column = tl.arange(0, R)
    ckv = tl.load(source[:, None] + column[None, :], mask=is_cached[:, None], other=0)
    if SCALES == "inline":
        ckv = tl.reshape(ckv, [TOKENS, SHARES, R // SHARES])
    if SCALES != "none":
        ckv = tl.reshape(decode(ckv, tl.float32, NATIVE) * scale, [TOKENS, R]).to(dtype)
    target = ckv_ptr + at.to(tl.int64)[:, None] * stride_ckv + column[None, :]
    tl.store(target, ckv, mask=live[:, None])
    column = tl.arange(0, P)
    if SCALES == "inline":
        k_pe_at = (source + R + 4 * SHARES).to(tl.pointer_type(tl.int16), bitcast=True)
        k_pe = tl.load(k_pe_at[:, None] + column[None, :], mask=is_cached[:, None], other=0)
        k_pe = from_bfloat16_bits(k_pe, dtype)
    else:
        k_pe = tl.load(source[:, None] + R + column[None, :], mask=is_cached[:, None], other=0)
        if SCALES != "none":
            k_pe = (decode(k_pe, tl.float32, NATIVE) * scale).to(dtype)
    target = k_pe_ptr + at.to(tl.int64)[:, None] * stride_k_pe + column[None, :]
    tl.store(target, k_pe, mask=live[:, None])
