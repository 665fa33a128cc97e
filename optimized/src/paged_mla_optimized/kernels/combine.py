"""Joins the query tiles that several programs worked on, and blanks padding (S-6, S-8, S-20).

The first programs along axis 0 join one group each: the groups of every row, or, where few of many
groups are cut, the group in which a part's range ends, if that part is the first to work on it.
Axes 1 and 2 share out the group's pairs and columns. A program's share never shows in the bits
(S-17): FEW partials or less are added one after another in every shape, more in tiles of one
shape. The last programs along axis 0 give padding ``(0, -inf)``.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.schedule import (
    find_group,
    fixed_split,
    query_rows,
    units_of_part,
)

FEW = tl.constexpr(8)


@triton.jit
def _blank(
    token, slot_mapping_ptr, out_ptr, lse_ptr, stride_out_token, stride_out_head,
    stride_lse_token, stride_lse_head, num_tokens, num_heads, R: tl.constexpr,
):  # fmt: skip
    """Write (0, -inf) for a token that has no slot, since it is padding."""
    slot = tl.load(slot_mapping_ptr + token, mask=token < num_tokens, other=0)
    line = token.to(tl.int64)
    if slot < 0:
        zeros = tl.zeros([R], out_ptr.dtype.element_ty)
        for head in range(num_heads):
            at = line * stride_out_token + head * stride_out_head
            tl.store(out_ptr + at + tl.arange(0, R), zeros)
            at = line * stride_lse_token + head * stride_lse_head
            tl.store(lse_ptr + at, float("-inf"))


@triton.jit
def _group_of_part(
    unit_starts_ptr, row_lens_ptr, num_rows, part, parts,
    TILE_N: tl.constexpr, MIN_UNITS: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Return row, group, first part and number of the partials that `part` joins, or 0 of them."""
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
    return row, group, part, count


@triton.jit
def _parts_of_group(
    unit_starts_ptr, token_starts_ptr, row_lens_ptr, row, group, num_rows, num_heads, parts,
    GROUP_M: tl.constexpr, TILE_N: tl.constexpr, MIN_UNITS: tl.constexpr,
):  # fmt: skip
    """Return the first part that worked on a group, and how many did if several, or 0."""
    _, _, _, length = units_of_part(unit_starts_ptr, num_rows, 0, parts, MIN_UNITS)
    query_len = tl.load(token_starts_ptr + row + 1) - tl.load(token_starts_ptr + row)
    key_tiles = tl.cdiv(tl.load(row_lens_ptr + row), TILE_N)
    begin = tl.load(unit_starts_ptr + row) + group.to(tl.int64) * key_tiles
    length = tl.maximum(length, 1)
    first = begin // length
    count = (begin + key_tiles - 1) // length - first + 1
    exists = (group < tl.cdiv(query_len * num_heads, GROUP_M)) & (key_tiles > 0)
    return first.to(tl.int32), tl.where(exists & (count > 1), count, 0).to(tl.int32)


@triton.jit
def _splits_of_group(
    token_starts_ptr, row_lens_ptr, row, group, num_heads, GROUP_M: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT_TILES: tl.constexpr, FIXED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return first slot and number of the partials of a group, or 0 of them."""
    groups, splits, _ = fixed_split(
        token_starts_ptr, row_lens_ptr, row, num_heads, GROUP_M, TILE_N, SPLIT_TILES, FIXED_SPLITS
    )
    is_cut = (group < groups) & (splits > 1)
    return row * FIXED_SPLITS + group * splits, tl.where(is_cut, splits, 0)


@triton.jit
def _line(first, i, within, GROUP_M: tl.constexpr, FIXED_SPLITS: tl.constexpr):
    """Return where partial `i` of a group keeps the pairs `within` it."""
    if FIXED_SPLITS > 0:
        slot = first + i
    else:  # the first part stored its tail, in its second slot; the others a head, in their first
        slot = (first + i) * 2 + tl.where(i == 0, 1, 0)
    return slot.to(tl.int64) * GROUP_M + within


@triton.jit
def _join_few(
    partial_out_ptr, partial_lse_ptr, first, count, within, column, R: tl.constexpr,
    GROUP_M: tl.constexpr, FIXED_SPLITS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return out [PAIRS, COLUMNS] and lse [PAIRS] of up to FEW partials."""
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    for i in range(count):
        at = _line(first, i, within, GROUP_M, FIXED_SPLITS)
        peak = tl.maximum(peak, tl.load(partial_lse_ptr + at))
    shift = tl.where(peak == float("-inf"), 0.0, peak)

    acc = tl.zeros([PAIRS, COLUMNS], tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    for i in range(0, count, 4):
        for ahead in tl.static_range(4):
            at = _line(first, i + ahead, within, GROUP_M, FIXED_SPLITS)
            inside = i + ahead < count
            lse = tl.load(partial_lse_ptr + at, mask=inside, other=float("-inf"))
            out_at = partial_out_ptr + at[:, None] * R + column[None, :]
            out = tl.load(out_at, mask=inside, other=0.0)
            weight = tl.exp(lse - shift)
            out = tl.where((lse == float("-inf"))[:, None], 0.0, out)  # it may hold anything
            acc += weight[:, None] * out
            total += weight
    is_empty = peak == float("-inf")
    divisor = tl.where(is_empty, 1.0, total)
    return acc / divisor[:, None], tl.where(is_empty, peak, peak + tl.log(divisor))


@triton.jit
def _join_many(
    partial_out_ptr, partial_lse_ptr, first, count, within, column, R: tl.constexpr,
    GROUP_M: tl.constexpr, FIXED_SPLITS: tl.constexpr, SOURCES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return out [WIDTH] and lse of one pair, from SOURCES partials at a time."""
    source = tl.arange(0, SOURCES)
    peaks = tl.full([SOURCES], float("-inf"), tl.float32)
    for i in range(0, count, SOURCES):
        at = _line(first, i + source, within, GROUP_M, FIXED_SPLITS)
        lse = tl.load(partial_lse_ptr + at, mask=i + source < count, other=float("-inf"))
        peaks = tl.maximum(peaks, lse)
    peak = tl.max(peaks, axis=0)
    shift = tl.where(peak == float("-inf"), 0.0, peak)

    acc = tl.zeros([SOURCES, WIDTH], tl.float32)
    totals = tl.zeros([SOURCES], tl.float32)
    for i in range(0, count, SOURCES):
        at = _line(first, i + source, within, GROUP_M, FIXED_SPLITS)
        lse = tl.load(partial_lse_ptr + at, mask=i + source < count, other=float("-inf"))
        is_full = lse > float("-inf")  # an empty partial may hold anything
        out_at = partial_out_ptr + at[:, None] * R + column[None, :]
        out = tl.load(out_at, mask=is_full[:, None], other=0.0)
        weight = tl.exp(lse - shift)
        acc += weight[:, None] * out
        totals += weight
    total = tl.sum(totals, axis=0)
    is_empty = peak == float("-inf")
    divisor = tl.where(is_empty, 1.0, total)
    return tl.sum(acc, axis=0) / divisor, tl.where(is_empty, peak, peak + tl.log(divisor))


@triton.jit(do_not_specialize=["joins", "parts", "num_rows", "num_tokens", "stride_lse_token",
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
    groups,  # most groups of a row; 0 when programs are numbered by part
    parts,
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
    SEARCH_STEPS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOURCES: tl.constexpr,  # partials of one tile, where there are many
    OVERLAP: tl.constexpr,  # launched while the attend kernel still runs
):
    GROUP_M: tl.constexpr = LANES * TILE_M
    program = tl.program_id(0)
    chunk = tl.program_id(1)
    row = program // tl.maximum(groups, 1)
    group = program % tl.maximum(groups, 1)
    first = program
    count = program * 0
    if program < joins:
        if FIXED_SPLITS > 0:
            first, count = _splits_of_group(
                token_starts_ptr, row_lens_ptr, row, group, num_heads,
                GROUP_M, TILE_N, SPLIT_TILES, FIXED_SPLITS,
            )  # fmt: skip
        elif groups > 0:
            first, count = _parts_of_group(
                unit_starts_ptr, token_starts_ptr, row_lens_ptr, row, group, num_rows, num_heads,
                parts, GROUP_M, TILE_N, MIN_UNITS,
            )  # fmt: skip
        else:
            row, group, first, count = _group_of_part(
                unit_starts_ptr, row_lens_ptr, num_rows, program, parts,
                TILE_N, MIN_UNITS, SEARCH_STEPS,
            )  # fmt: skip
    if OVERLAP:
        tl.extra.cuda.gdc_wait()  # until the partials are there
    if (program >= joins) & (tl.program_id(2) == 0):
        _blank(
            (program - joins) * tl.num_programs(1) + chunk, slot_mapping_ptr, out_ptr, lse_ptr,
            stride_out_token, stride_out_head, stride_lse_token, stride_lse_head, num_tokens,
            num_heads, R,
        )  # fmt: skip
    if count == 0:
        return

    token, head, _, live = query_rows(
        token_starts_ptr, row, group * (GROUP_M // PAIRS) + chunk, num_heads, PAIRS
    )
    at = token * stride_out_token + head * stride_out_head
    lse_at = lse_ptr + token * stride_lse_token + head * stride_lse_head
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    within = chunk * PAIRS + tl.arange(0, PAIRS)
    if count <= FEW:
        out, lse = _join_few(
            partial_out_ptr, partial_lse_ptr, first, count, within, column,
            R, GROUP_M, FIXED_SPLITS, PAIRS, COLUMNS,
        )  # fmt: skip
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] + column[None, :], out, mask=live[:, None])
        if tl.program_id(2) == 0:
            tl.store(lse_at, lse, mask=live)
        return

    WIDTH: tl.constexpr = min(128, R)
    for pair in range(PAIRS):
        is_pair = tl.arange(0, PAIRS) == pair
        line = tl.sum(tl.where(is_pair, at, 0), axis=0)
        exists = tl.sum((is_pair & live).to(tl.int32), axis=0) > 0
        for begin in range(0, COLUMNS, WIDTH):
            some = tl.program_id(2) * COLUMNS + begin + tl.arange(0, WIDTH)
            sums, sums_lse = _join_many(
                partial_out_ptr, partial_lse_ptr, first, count, chunk * PAIRS + pair, some,
                R, GROUP_M, FIXED_SPLITS, SOURCES, WIDTH,
            )  # fmt: skip
            sums = sums.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + line + some, sums, mask=exists)
            if tl.program_id(2) == 0:
                lses = tl.zeros([PAIRS], tl.float32) + sums_lse
                tl.store(lse_at, lses, mask=live & is_pair)
