"""Joins the query tiles that several parts of the grid worked on (rules S-8, S-20).

Program ``(part, chunk)`` serves the group in which `part`'s range ends, if the range cuts it and
`part` is the first to work on it; every other program returns at once.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.merge import add_partial, close_sum, empty_sum
from paged_mla_optimized.kernels.schedule import find_group, query_rows, units_of_part


@triton.jit(do_not_specialize=["num_rows", "stride_lse_token", "stride_lse_head"])
def combine_kernel(
    unit_starts_ptr,
    token_starts_ptr,
    row_lens_ptr,
    partial_out_ptr,  # float32 [parts, 2, LANES, TILE_M, R]
    partial_lse_ptr,  # float32 [parts, 2, LANES, TILE_M]
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    num_rows,
    num_heads,
    R: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    CHUNK_M: tl.constexpr,  # pairs of one program
):
    part = tl.program_id(0)
    begin, end, total, length = units_of_part(
        unit_starts_ptr, num_rows, part, tl.num_programs(0), MIN_UNITS
    )
    if begin >= end or end == total:
        return
    row, group, group_begin, group_end = find_group(
        unit_starts_ptr, row_lens_ptr, num_rows, end - 1, TILE_N, SEARCH_STEPS
    )
    if group_begin < begin or group_end == end:
        return
    last_part = ((group_end - 1) // length).to(tl.int32)
    chunk = tl.program_id(1)
    lane = chunk * CHUNK_M // TILE_M
    first_pair = group * LANES * TILE_M + chunk * CHUNK_M
    token, head, _, live = query_rows(
        token_starts_ptr, row, first_pair // CHUNK_M, num_heads, CHUNK_M
    )
    column = tl.arange(0, R)
    within = chunk * CHUNK_M % TILE_M + tl.arange(0, CHUNK_M)

    acc, weight, peak = empty_sum(CHUNK_M, R)
    for source in range(part, last_part + 1):
        half = tl.where(source == part, 1, 0)  # the first part stored its tail, the others a head
        at = ((source * 2 + half) * LANES + lane).to(tl.int64) * TILE_M + within
        lse = tl.load(partial_lse_ptr + at)
        out = tl.load(partial_out_ptr + at[:, None] * R + column[None, :])
        acc, weight, peak = add_partial(acc, weight, peak, out, lse)
    out, lse = close_sum(acc, weight, peak)

    at = token * stride_out_token + head * stride_out_head
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + column[None, :], out, mask=live[:, None])
    tl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)
