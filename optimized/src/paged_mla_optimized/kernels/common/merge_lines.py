"""Merge partial results that arrive as lines, each with its lse after its numbers (rule S-8).

The pairs of token and head are counted head by head: pair ``h * T + t`` is token t of head h. Each
program of the grid merges ROWS pairs, over all n partial results. No program depends on another.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.merge import add_partial, close_sum, empty_sum


@triton.jit(do_not_specialize=["num_partials", "num_pairs", "num_tokens", "num_lines", "lse_unit"])
def merge_lines_kernel(
    lines_ptr,  # [n, num_lines, LINE]: R numbers of `out`, then the lse, then unused elements
    line_lses_ptr,  # the same memory as float32
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    num_partials,  # n
    num_lines,  # of one partial result
    num_tokens,  # T
    num_pairs,  # H * T
    lse_unit,  # the kernel multiplies each lse by this factor before it stores it
    R: tl.constexpr,
    LINE: tl.constexpr,
    WORD: tl.constexpr,  # elements of `lines_ptr` in 32 bits
    ROWS: tl.constexpr,  # pairs of a program
):
    pair = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, R)
    is_pair = pair < num_pairs
    acc, total, peak = empty_sum(ROWS, R)
    for partial in range(num_partials):
        line = partial * num_lines.to(tl.int64) + pair
        lse_at = line * (LINE // WORD) + R // WORD
        lse = tl.load(line_lses_ptr + lse_at, mask=is_pair, other=float("-inf"))
        at = line[:, None] * LINE + column[None, :]
        out = tl.load(lines_ptr + at, mask=is_pair[:, None], other=0.0).to(tl.float32)
        acc, total, peak = add_partial(acc, total, peak, out, lse)
    out, lse = close_sum(acc, total, peak)
    token = (pair % num_tokens).to(tl.int64)
    head = (pair // num_tokens).to(tl.int64)
    out_at = token * stride_out_token + head * stride_out_head
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_at[:, None] + column[None, :], out, mask=is_pair[:, None])
    tl.store(
        lse_ptr + token * stride_lse_token + head * stride_lse_head, lse * lse_unit, mask=is_pair
    )
