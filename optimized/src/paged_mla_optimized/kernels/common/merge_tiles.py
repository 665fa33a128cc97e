"""Merge the result over one chunk of the context into the result so far, in place (S-8, S-21).

The kernel keeps each result so far as two numbers of the output type: `out`, and `rest`, the
rounding error of `out`. So many chunks lose no more accuracy than one chunk.

The grid has ``most_tiles * (TILE_M / LINES) * H`` programs. A program merges LINES tokens of one
query tile of the prefill plan (``prefill_plan.py``), for one head. Programs past the tiles of the
step return at once.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.merge import add_partial, close_sum, empty_sum
from paged_mla_optimized.kernels.common.prefill_plan import load_tile


@triton.jit(do_not_specialize=["stride_lse_token", "stride_lse_head"])
def merge_tiles_kernel(
    tiles_ptr,  # int32 [tiles, TILE_WORDS] of the prefill plan
    work_ptr,  # int32 [WORK_WORDS] of the prefill plan
    out_ptr,  # [T, H, V], read and written
    lse_ptr,  # float32 [T, H], read and written
    rest_ptr,  # [T, H, V], dense, read and written
    chunk_out_ptr,  # [T, H, V], dense
    chunk_lse_ptr,  # float32 [T, H], dense
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    num_heads,
    V: tl.constexpr,
    TILE_M: tl.constexpr,
    LINES: tl.constexpr,  # tokens of a program; divides TILE_M
):
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    share = tl.program_id(0) // num_heads
    tile = share // (TILE_M // LINES)
    if tile >= tl.load(work_ptr):
        return
    first, count, _key_start, _key_len, _context = load_tile(tiles_ptr, tile, 0)
    index = share % (TILE_M // LINES) * LINES + tl.arange(0, LINES)
    live = index < count
    token = first.to(tl.int64) + index
    column = tl.arange(0, V)[None, :]
    out_at = out_ptr + (token * stride_out_token + head * stride_out_head)[:, None] + column
    lse_at = lse_ptr + token * stride_lse_token + head * stride_lse_head
    line = token * num_heads + head
    rest_at = rest_ptr + line[:, None] * V + column
    mask = live[:, None]
    out = tl.load(out_at, mask=mask, other=0.0).to(tl.float32)
    out += tl.load(rest_at, mask=mask, other=0.0).to(tl.float32)
    lse = tl.load(lse_at, mask=live, other=float("-inf"))
    acc, total, peak = empty_sum(LINES, V)
    acc, total, peak = add_partial(acc, total, peak, out, lse)
    chunk_at = chunk_out_ptr + line[:, None] * V + column
    chunk = tl.load(chunk_at, mask=mask, other=0.0).to(tl.float32)
    chunk_lse = tl.load(chunk_lse_ptr + line, mask=live, other=float("-inf"))
    acc, total, peak = add_partial(acc, total, peak, chunk, chunk_lse)
    acc, lse = close_sum(acc, total, peak)
    dtype = out_ptr.dtype.element_ty
    out = acc.to(dtype)
    tl.store(out_at, out, mask=mask)
    tl.store(rest_at, (acc - out.to(tl.float32)).to(dtype), mask=mask)
    tl.store(lse_at, lse, mask=live)
