"""Joins the query tiles that several programs worked on, and blanks padding (S-6, S-8, S-20).

The first programs join, each CHUNK_M pairs of one group. By the grid's ranges, program `part`
serves the group in which the range of `part` ends, if the range cuts it and `part` is the first
to work on it. With FIXED_SPLITS, programs are numbered by row and group. All others return at once.
One program for each token follows: padding gets ``(0, -inf)``.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.merge import add_partial, close_sum, empty_sum
from paged_mla_optimized.kernels.schedule import (
    find_group,
    fixed_split,
    query_rows,
    units_of_part,
)


@triton.jit
def _blank(
    token, slot_mapping_ptr, out_ptr, lse_ptr, stride_out_token, stride_out_head,
    stride_lse_token, stride_lse_head, num_tokens, num_heads, R: tl.constexpr,
):  # fmt: skip
    """Write (0, -inf) for a token that has no slot, since it is padding."""
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=0)
    if slot < 0:
        out_row_ptr = out_ptr + token.to(tl.int64) * stride_out_token
        lse_row_ptr = lse_ptr + token.to(tl.int64) * stride_lse_token
        zeros = tl.zeros([R], out_ptr.dtype.element_ty)
        for head in range(num_heads):
            tl.store(out_row_ptr + head * stride_out_head + tl.arange(0, R), zeros)
            tl.store(lse_row_ptr + head * stride_lse_head, float("-inf"))


@triton.jit
def _cut_by_part(
    unit_starts_ptr, row_lens_ptr, num_rows, part, parts,
    TILE_N: tl.constexpr, MIN_UNITS: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Return row, group, first slot and number of the partials that `part` joins, or 0 of them."""
    begin, end, total, length = units_of_part(unit_starts_ptr, num_rows, part, parts, MIN_UNITS)
    row = num_rows
    group = part * 0
    count = part * 0
    if (begin < end) & (end < total):
        row, group, group_begin, group_end = find_group(
            unit_starts_ptr, row_lens_ptr, num_rows, end - 1, TILE_N, SEARCH_STEPS
        )
        if (group_begin >= begin) & (group_end > end):
            count = ((group_end - 1) // length).to(tl.int32) - part + 1
    return row, group, part * 2 + 1, count  # a part's tail, then the heads of the parts after it


@triton.jit
def _cut_by_row(
    token_starts_ptr, row_lens_ptr, row, group, num_heads, GROUP_M: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT_TILES: tl.constexpr, FIXED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return first slot and number of the partials of a group, or 0 of them."""
    groups, splits, _ = fixed_split(
        token_starts_ptr, row_lens_ptr, row, num_heads, GROUP_M, TILE_N, SPLIT_TILES, FIXED_SPLITS
    )
    is_cut = (group < groups) & (splits > 1)
    return row * FIXED_SPLITS + group * splits, tl.where(is_cut, splits, 0)


@triton.jit(do_not_specialize=["joins", "num_rows", "num_tokens", "stride_lse_token",
                               "stride_lse_head"])  # fmt: skip
def combine_kernel(
    unit_starts_ptr,
    token_starts_ptr,
    row_lens_ptr,
    slot_mapping_ptr,  # int64 [T]
    partial_out_ptr,  # float32 [slots, LANES, TILE_M, R]
    partial_lse_ptr,  # float32 [slots, LANES, TILE_M]
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    joins,  # programs along axis 0 that join
    num_rows,
    num_tokens,
    num_heads,
    R: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANES: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    FIXED_GROUPS: tl.constexpr,  # most groups of a row that has several splits
    SEARCH_STEPS: tl.constexpr,
    CHUNK_M: tl.constexpr,  # pairs of one program
):
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    if program >= joins:
        token = (program - joins) * tl.num_programs(1) + chunk
        _blank(
            token, slot_mapping_ptr, out_ptr, lse_ptr, stride_out_token, stride_out_head,
            stride_lse_token, stride_lse_head, num_tokens, num_heads, R,
        )  # fmt: skip
        return
    if FIXED_SPLITS > 0:
        row = program // FIXED_GROUPS
        group = program % FIXED_GROUPS
        first, count = _cut_by_row(
            token_starts_ptr, row_lens_ptr, row, group, num_heads,
            LANES * TILE_M, TILE_N, SPLIT_TILES, FIXED_SPLITS,
        )  # fmt: skip
    else:
        row, group, first, count = _cut_by_part(
            unit_starts_ptr, row_lens_ptr, num_rows, program, joins,
            TILE_N, MIN_UNITS, SEARCH_STEPS,
        )  # fmt: skip
    if count == 0:
        return
    lane = chunk * CHUNK_M // TILE_M
    first_pair = group * LANES * TILE_M + chunk * CHUNK_M
    token, head, _, live = query_rows(
        token_starts_ptr, row, first_pair // CHUNK_M, num_heads, CHUNK_M
    )
    column = tl.arange(0, R)
    within = chunk * CHUNK_M % TILE_M + tl.arange(0, CHUNK_M)

    acc, weight, peak = empty_sum(CHUNK_M, R)
    for i in range(count):
        slot = first + i
        if FIXED_SPLITS == 0:
            slot += tl.maximum(i - 1, 0)  # heads are every second slot
        at = (slot * LANES + lane).to(tl.int64) * TILE_M + within
        lse = tl.load(partial_lse_ptr + at)
        out = tl.load(partial_out_ptr + at[:, None] * R + column[None, :])
        acc, weight, peak = add_partial(acc, weight, peak, out, lse)
    out, lse = close_sum(acc, weight, peak)

    at = token * stride_out_token + head * stride_out_head
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + column[None, :], out, mask=live[:, None])
    tl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)
