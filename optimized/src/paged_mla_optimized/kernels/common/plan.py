"""Derive the plan of a step on the device (rules S-1, S-2, S-3, S-14).

Two launches write the plan:

* ``schedule_kernel``: program 0 computes the prefix sums of the rows and the cuts of the step. If
  the engine passes a request map, the other programs build the block table, each ENTRIES entries of
  one row. Row `num_rows` is a pseudo-row of length 0 that owns the padded tokens.
* ``token_kernel``: each program handles TOKENS tokens. It writes their positions and slots, and
  packs their lines of the draft tree into bits. It also writes the shares of attend programs and
  the join records, which it counts with the same index. It reads the results of the first launch.

Lengths, tables and masks come from the engine's device memory, and may contain any numbers. All
later kernels of a step compute addresses from the plan. So the plan turns each row that rule S-2
does not allow into a padded row: its `row_lens` is 0.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.schedule import (
    CUT_GROUP_OVERHEAD,
    CUT_LANES,
    CUT_PADDING,
    CUT_PART_UNITS,
    CUT_SPLIT_OVERHEAD,
    CUT_SPLIT_TILES,
    CUT_UNITS,
    JOIN_ALIVE,
    JOIN_COUNT,
    JOIN_FIRST,
    JOIN_FIRST_PAIR,
    JOIN_ROOM,
    JOIN_SHARE,
    JOIN_SHARES,
    JOIN_START,
    JOIN_WORDS,
    SHARE_END,
    SHARE_PARTIAL,
    SHARE_ROW,
    SHARE_SOURCE,
    SHARE_STATES,
    SHARE_UNIT,
    Work,
    count_at_most,
    fixed_partial,
    fixed_splits,
    group_of_unit,
    lanes_of_group,
    place_of_part,
    running_maximum,
    share_of,
    split_of_unit,
)

_MOST_ELEMENTS = tl.constexpr(2**40)  # bound for a row's tree matrix: sums do not overflow int64


class Lengths(NamedTuple):
    """The lengths of the rows of a step, as the engine passes them."""

    cu_seqlens_q_ptr: tl.tensor  # int32 [B + 1]
    seq_lens_ptr: tl.tensor  # int32 [B]
    stride_cu: tl.tensor
    stride_lens: tl.tensor


class Requests(NamedTuple):
    """A request map, which all programs of ``schedule_kernel`` except the first read."""

    req_to_token_ptr: tl.tensor  # int32 [requests, tokens]: slots
    request_ids_ptr: tl.tensor  # [B]: line of `req_to_token` of each row
    stride_request: tl.tensor
    stride_slot: tl.tensor
    stride_ids: tl.tensor


class Rows(NamedTuple):
    """The buffers that ``schedule_kernel`` writes: prefix sums of the rows, and the cuts."""

    token_starts_ptr: tl.tensor  # int32 [B + 2]: first token of each row
    row_lens_ptr: tl.tensor  # int32 [B + 1]: keys of each row
    key_starts_ptr: tl.tensor  # int32 [B + 2]: first key of each row; at most 2 ** 31 - 1
    first_tokens_ptr: tl.tensor  # int32 [B]: zeros
    unit_starts_ptr: tl.tensor  # int64 [B + 2]: first unit of each row
    cut_ptr: tl.tensor  # int64 [4], with FIXED_SPLITS [5 + B + 1]: see ``schedule.py``
    join_starts_ptr: tl.tensor  # int32 [B + 2]; FIXED_SPLITS: prefix sums of query tiles to join
    mask_starts_ptr: tl.tensor  # int64 [B + 1]: first draft element of each row's tree matrix


class Tokens(NamedTuple):
    """The buffers that ``token_kernel`` writes for each token."""

    positions_ptr: tl.tensor  # int64 [T]
    slot_mapping_ptr: tl.tensor  # int64 [T]
    is_padding_ptr: tl.tensor  # int8 [T]: 1 for padding


class MaskLines(NamedTuple):
    """The mask of a draft tree, in the layout that MASK specifies."""

    ptr: tl.tensor  # uint8
    stride_line: tl.tensor
    stride_element: tl.tensor


@triton.jit
def _build_table(
    program, requests, seq_lens_ptr, stride_lens, table_ptr, block_size, width, fill, longest,
    num_requests, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write ENTRIES entries of one row's block table.

    Entries past the keys of the row are `fill`. An entry is -1 if the map has a negative number in
    place of the slot. All entries are `fill` if the row is padded because of its length or request.
    """
    programs_of_row = tl.cdiv(width, ENTRIES)
    row = program // programs_of_row
    entry = program % programs_of_row * ENTRIES + tl.arange(0, ENTRIES)
    seq_len = tl.load(seq_lens_ptr + row * stride_lens)
    has_keys = (seq_len > 0) & (seq_len <= longest)
    request_at = requests.request_ids_ptr + row * requests.stride_ids
    request = tl.load(request_at, mask=has_keys, other=-1).to(tl.int64)
    is_known = (request >= 0) & (request < num_requests)
    key = entry.to(tl.int64) * block_size
    exists = is_known & (key < seq_len)
    at = request * requests.stride_request + key * requests.stride_slot
    slot = tl.load(requests.req_to_token_ptr + at, mask=exists, other=-1)
    block = tl.where(slot >= 0, slot // block_size, -1)
    block = tl.where(exists, block, fill)
    tl.store(table_ptr + row.to(tl.int64) * width + entry, block, mask=entry < width)


@triton.jit
def _choose_lanes(pairs, key_tiles, TILE_M: tl.constexpr, LANE_STEPS: tl.constexpr):
    """Return the largest number of lanes, up to ``2 ** LANE_STEPS``, that leaves few lanes idle.

    With more lanes each key is read less often. But in a group with fewer query tiles than lanes
    the other lanes are idle. At most one query tile in 17 may be missing.
    """
    most = tl.sum(tl.cdiv(pairs, TILE_M).to(tl.int64) * key_tiles)
    lanes = tl.full([], 1, tl.int64)
    for step in tl.static_range(1, LANE_STEPS + 1):
        groups = tl.cdiv(pairs, TILE_M << step)
        spent = tl.sum(groups.to(tl.int64) * key_tiles) << step
        lanes = tl.where(spent * 16 <= most * 17, 1 << step, lanes)
    return lanes


@triton.jit
def _choose_length(
    groups, key_tiles, starts, lanes, PROGRAMS: tl.constexpr, MIN_UNITS: tl.constexpr,
    OVERHEAD: tl.constexpr, SLACK: tl.constexpr,
):  # fmt: skip
    """Return the units of a part, the overhead, and whether the even division is used.

    In general the length of a part is an equal share of all units, and each of the `starts` of a
    row, of its groups or of their splits, counts as OVERHEAD units.

    If all rows have the same number of key tiles, a part may be longer than an equal share by up to
    SLACK 32nds, so that cuts are between rows or at equal places in each row. The parts are then
    less equal, but write fewer partial results and start fewer groups. All parts start the same
    number of groups, so only the overhead counts that makes the pieces of a row equally long.
    """
    total = tl.sum(groups.to(tl.int64) * key_tiles)
    counted = tl.sum(tl.where(key_tiles > 0, groups, 0)).to(tl.int64)
    begun = tl.sum(tl.where(key_tiles > 0, starts, 0)).to(tl.int64)
    parts = PROGRAMS // lanes
    share = tl.maximum(tl.cdiv(total, parts), MIN_UNITS)
    row = tl.maximum(tl.max(tl.where(groups > 0, key_tiles, 0)), 1).to(tl.int64)
    pieces = tl.minimum(parts // tl.maximum(counted, 1), row // MIN_UNITS)
    piece = tl.cdiv(row, tl.maximum(pieces, 1))
    fitted = tl.where(counted > parts, tl.cdiv(counted, parts) * row, piece)
    fits = (total == row * counted) & ((fitted - share) * 32 <= share * SLACK)
    begin = tl.where(counted > parts, 0, tl.cdiv(row, piece) * piece - row)
    equal = tl.maximum(tl.cdiv(total + OVERHEAD * begun, parts), MIN_UNITS)
    return tl.where(fits, fitted, equal), tl.where(fits, begin, OVERHEAD).to(tl.int64), fits


@triton.jit
def _cut_rows(
    pairs, key_tiles, TILE_M: tl.constexpr, MIN_UNITS: tl.constexpr, SPLIT_TILES: tl.constexpr,
    ROW_SHARE: tl.constexpr, FIXED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Return the splits of each query tile of a row, and the key tiles of each split but the last.

    A row is cut for ROW_SHARE programs, into splits of MIN_UNITS to SPLIT_TILES key tiles. For rows
    of four query tiles or more the upper limit is twice as high, because their lanes leave fewer
    parts. All query tiles of a row together have at most FIXED_SPLITS splits, or one split each.
    """
    query_tiles = tl.cdiv(pairs, TILE_M)
    divisor = tl.maximum(query_tiles, 1)
    key_tiles = tl.maximum(key_tiles, 1)
    longest = tl.where(query_tiles >= 4, SPLIT_TILES * 2, SPLIT_TILES)
    length = tl.cdiv(key_tiles, tl.maximum(ROW_SHARE // divisor, 1))
    length = tl.minimum(tl.maximum(length, MIN_UNITS), longest)
    most = tl.maximum(FIXED_SPLITS // divisor, 1)
    length = tl.cdiv(key_tiles, tl.minimum(tl.cdiv(key_tiles, length), most))
    return tl.cdiv(key_tiles, length), length


@triton.jit
def _load_rows(
    lengths, requests, num_rows, num_tokens, longest, num_requests, max_draft_tokens,
    mask_elements, MASK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load the rows of a step; rows that S-2 does not allow have no keys.

    Tokens at or past `num_tokens` are dropped; the tokens before them keep their positions.

    Returns
    -------
    starts, query_lens
        First token of each row, and its number of tokens; rows follow each other in the step.
    seq_lens
        Keys of each row; 0 for padded rows.
    first_elements
        First element of each row's tree matrix that is about drafts.
    """
    row = tl.arange(0, ROWS)
    is_real = row < num_rows
    start_at = lengths.cu_seqlens_q_ptr + row * lengths.stride_cu
    given_starts = tl.load(start_at, mask=row <= num_rows, other=num_tokens)
    given_ends = tl.load(start_at + lengths.stride_cu, mask=is_real, other=num_tokens)
    len_at = lengths.seq_lens_ptr + row * lengths.stride_lens
    given_lens = tl.load(len_at, mask=is_real, other=0)
    within = tl.minimum(tl.maximum(given_starts, 0), num_tokens)
    starts = running_maximum(within)
    ends = tl.maximum(starts, tl.minimum(given_ends, num_tokens))
    query_lens = ends - starts
    given_query_lens = given_ends - given_starts
    seq_lens = tl.maximum(given_lens - (given_query_lens - query_lens), 0)

    is_legal = is_real & (given_starts >= 0) & (given_ends >= given_starts) & (starts == within)
    is_legal &= (given_lens > 0) & (given_lens <= longest)
    if MASK != "non_causal":
        is_legal &= given_lens >= given_query_lens
    first_elements = starts.to(tl.int64)  # unused without a flat mask
    if MASK == "tree:qlen" or MASK == "tree:full":
        ascends = given_ends > given_starts  # a difference that overflows int32 has any sign
        lines = tl.where(ascends, tl.maximum(given_query_lens, 0), 0).to(tl.int64)
        columns = lines if MASK == "tree:qlen" else tl.maximum(given_lens, 0)
        elements = tl.where(is_real, tl.minimum(lines * columns, _MOST_ELEMENTS), 0)
        element_ends = tl.cumsum(elements)
        is_legal &= element_ends <= mask_elements
        first_elements = element_ends - elements + columns - lines  # past the context
    if MASK != "causal" and MASK != "non_causal":
        is_legal &= given_query_lens <= max_draft_tokens
    if num_requests >= 0:
        request_at = requests.request_ids_ptr + row * requests.stride_ids
        request = tl.load(request_at, mask=is_legal, other=0)
        is_legal &= (request >= 0) & (request < num_requests)
    return starts, query_lens, tl.where(is_legal, seq_lens, 0), first_elements


@triton.jit(do_not_specialize=[
    "num_rows", "num_tokens", "fill", "longest", "num_requests", "max_draft_tokens",
    "mask_elements",
])  # fmt: skip
def schedule_kernel(
    lengths: Lengths,
    requests: Requests,
    rows: Rows,  # out
    table_ptr,  # out int32 [B, width]; written only with a request map
    num_rows,
    num_tokens,
    num_heads,
    block_size,
    width,
    fill,  # table entry past the keys of a row
    longest,  # most tokens that the model, the block table and the map allow in a row
    num_requests,  # lines of the request map; -1 without a request map
    max_draft_tokens,
    mask_elements: tl.int64,  # elements of a flat mask
    MASK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANE_STEPS: tl.constexpr,  # there are at most 2 ** LANE_STEPS lanes
    PROGRAMS: tl.constexpr,  # programs of the attend kernel
    MIN_UNITS: tl.constexpr,  # fewest units of a part, and fewest key tiles of a split
    OVERHEAD: tl.constexpr,  # key tiles that take the time of starting a group
    SLACK: tl.constexpr,  # 32nds by which parts may be longer so that equal rows are cut equally
    SPLIT_TILES: tl.constexpr,  # see ``_cut_rows``
    ROW_SHARE: tl.constexpr,  # see ``_cut_rows``
    FIXED_SPLITS: tl.constexpr,  # most splits of a row; 0: the splits follow the grid's ranges
    ROWS: tl.constexpr,  # power of two >= B + 2
    ENTRIES: tl.constexpr,  # table entries of a program
):
    if tl.program_id(0) > 0:
        _build_table(
            tl.program_id(0) - 1, requests, lengths.seq_lens_ptr, lengths.stride_lens, table_ptr,
            block_size, width, fill, longest, num_requests, ENTRIES,
        )  # fmt: skip
        return
    row = tl.arange(0, ROWS)
    is_row = row <= num_rows
    is_real = row < num_rows
    starts, query_lens, seq_lens, first_elements = _load_rows(
        lengths, requests, num_rows, num_tokens, longest, num_requests, max_draft_tokens,
        mask_elements, MASK, ROWS,
    )  # fmt: skip
    pairs = query_lens * num_heads
    key_tiles = tl.cdiv(seq_lens, TILE_N)
    lanes = _choose_lanes(pairs, key_tiles, TILE_M, LANE_STEPS)
    groups = tl.cdiv(pairs, (lanes * TILE_M).to(tl.int32))
    if FIXED_SPLITS > 0:
        splits, split_tiles = _cut_rows(
            pairs, key_tiles, TILE_M, MIN_UNITS, SPLIT_TILES, ROW_SHARE, FIXED_SPLITS
        )
        length, overhead, is_even = _choose_length(
            groups, key_tiles, groups * splits, lanes, PROGRAMS, MIN_UNITS, OVERHEAD, SLACK
        )
        has_units = (groups > 0) & (key_tiles > 0)
        longest = tl.max(tl.where(has_units, split_tiles, 0)).to(tl.int64)
        # The pieces of rows of equal length are at least as long as their splits.
        lacking = tl.max(tl.where(has_units, splits * split_tiles - key_tiles, 0)).to(tl.int64)
        padding = tl.where(is_even, tl.where(length < longest, lacking, overhead), 0)
        overhead = tl.where(is_even, 0, overhead)
        length = tl.maximum(length, longest)
        units_of_group = splits * overhead + key_tiles + padding
        tl.store(rows.cut_ptr + CUT_PADDING, padding)
        tl.store(rows.cut_ptr + CUT_SPLIT_OVERHEAD, overhead)
        split_at = rows.cut_ptr + CUT_SPLIT_TILES + row
        tl.store(split_at, split_tiles.to(tl.int64), mask=is_row)
        to_join = tl.where(splits > 1, tl.cdiv(pairs, TILE_M), 0)
        tl.store(rows.join_starts_ptr, 0)
        tl.store(rows.join_starts_ptr + row + 1, tl.cumsum(to_join), mask=is_row)
    else:
        length, overhead, _ = _choose_length(
            groups, key_tiles, groups, lanes, PROGRAMS, MIN_UNITS, OVERHEAD, SLACK
        )
        units_of_group = key_tiles + overhead
        tl.store(rows.cut_ptr + CUT_GROUP_OVERHEAD, overhead)
    units = tl.where(key_tiles > 0, groups * units_of_group, 0)
    unit_ends = tl.cumsum(units)
    tl.store(rows.cut_ptr + CUT_PART_UNITS, length)
    tl.store(rows.cut_ptr + CUT_LANES, lanes)
    tl.store(rows.cut_ptr + CUT_UNITS, tl.sum(units))

    tl.store(rows.token_starts_ptr + row, starts, mask=row <= num_rows + 1)
    tl.store(rows.row_lens_ptr + row, seq_lens, mask=is_row)
    key_ends = tl.minimum(tl.cumsum(seq_lens.to(tl.int64)), 2**31 - 1).to(tl.int32)
    tl.store(rows.key_starts_ptr, 0)
    tl.store(rows.key_starts_ptr + row + 1, key_ends, mask=is_row)
    tl.store(rows.first_tokens_ptr + row, tl.zeros_like(seq_lens), mask=is_real)
    tl.store(rows.unit_starts_ptr, 0)
    tl.store(rows.unit_starts_ptr + row + 1, unit_ends, mask=is_row)

    if MASK == "tree:qlen" or MASK == "tree:full":
        tl.store(rows.mask_starts_ptr + row, first_elements, mask=is_row)


@triton.jit
def _tree_bits(
    lines, token, index, column, inside, start, columns, MASK: tl.constexpr,
):  # fmt: skip
    """Return 1 where a token sees a draft node, otherwise 0; int32 [TOKENS, 32].

    MASK specifies the layout of the mask.
    """
    if MASK == "tree:packed":
        at = lines.ptr + (token.to(tl.int64) * lines.stride_line)[:, None]
        at += (column // 8)[None, :] * lines.stride_element
        byte = tl.load(at, mask=inside, other=0)
        bits = (byte.to(tl.int32) >> (column % 8)[None, :]) & 1
    else:
        line = start + index.to(tl.int64) * columns
        at = lines.ptr + (line[:, None] + column[None, :]) * lines.stride_element
        byte = tl.load(at, mask=inside, other=0)
        bits = (byte != 0).to(tl.int32)
    return bits


@triton.jit
def _describe_parts(
    part, programs, work, joins_ptr, num_rows, num_heads, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, LANE_STEPS: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    """Store the shares of the programs of a part, and the join record of the cut before it."""
    length = tl.load(work.cut_ptr + CUT_PART_UNITS)
    total = tl.load(work.cut_ptr + CUT_UNITS)
    unit = part * length
    row = count_at_most(work.unit_starts_ptr + 1, num_rows, tl.minimum(unit, total), SEARCH_STEPS)
    group, begin, end = group_of_unit(work, row, unit, TILE_N)
    exists = unit < total
    lanes = lanes_of_group(work)
    used = tl.cdiv(total, length).to(tl.int32)
    place = place_of_part(part, programs // lanes, used)
    for lane in tl.static_range(1 << LANE_STEPS):
        program = place * lanes + lane
        share_ptr = share_of(work, program, 0)
        inside = (lane < lanes) & (program < programs)
        first_unit = tl.where(exists, tl.maximum(unit, begin), total)
        tl.store(share_ptr + SHARE_UNIT, first_unit, mask=inside)
        tl.store(share_ptr + SHARE_END, tl.minimum(unit + length, total), mask=inside)
        tl.store(share_ptr + SHARE_ROW, row.to(tl.int64), mask=inside)
        partial_ptr = share_ptr + SHARE_PARTIAL
        tl.store(partial_ptr, (part * 2 * lanes + lane).to(tl.int64), mask=inside)
    first = begin // length
    count = tl.where(exists & (begin < unit), (end - 1) // length - first + 1, 0).to(tl.int32)
    group_m = lanes * TILE_M
    _store_join(
        joins_ptr, part - 1, first.to(tl.int32), count, row, group, group_m, part - 1 - first,
        count - 1, work, num_heads, (part > 0) & (part <= programs),
    )  # fmt: skip


@triton.jit
def _split_at(unit, work, num_rows, TILE_N: tl.constexpr, SEARCH_STEPS: tl.constexpr):
    """Return the end of the part before a cut at `unit`, the start of the next part, and its row.

    The end and the start differ if the cut is in units of overhead or padding.
    """
    total = tl.load(work.cut_ptr + CUT_UNITS)
    row = count_at_most(work.unit_starts_ptr + 1, num_rows, tl.minimum(unit, total), SEARCH_STEPS)
    _, _, _, _, before, begin, end, after = split_of_unit(work, row, unit, TILE_N)
    stop = tl.where(unit <= begin, before, tl.minimum(unit, end))
    first = tl.where(unit < end, tl.maximum(unit, begin), after)
    exists = unit < total
    return tl.where(exists, stop, total), tl.where(exists, first, total), row


@triton.jit
def _describe_parts_of_splits(
    part, programs, work, num_rows, TILE_N: tl.constexpr, LANE_STEPS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr, FIXED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store the shares of the programs of a part, with FIXED_SPLITS, and clear their state flags.

    The parts are in the grid in reverse order. A program waits for the program that starts its last
    split, and the device starts programs with lower numbers first.
    """
    length = tl.load(work.cut_ptr + CUT_PART_UNITS)
    total = tl.load(work.cut_ptr + CUT_UNITS)
    unit = part * length
    _, begin, row = _split_at(unit, work, num_rows, TILE_N, SEARCH_STEPS)
    end, _, _ = _split_at(unit + length, work, num_rows, TILE_N, SEARCH_STEPS)
    lanes = lanes_of_group(work)
    parts = programs // lanes
    used = tl.cdiv(total, length).to(tl.int32)
    place = parts - 1 - place_of_part(part, parts, used)
    place = tl.where(part < parts, place, part)
    source = parts - 1 - place_of_part(part + 1, parts, used)
    for lane in tl.static_range(1 << LANE_STEPS):
        program = place * lanes + lane
        share_ptr = share_of(work, program, FIXED_SPLITS)
        inside = (lane < lanes) & (program < programs)
        tl.store(share_ptr + SHARE_UNIT, begin, mask=inside)
        tl.store(share_ptr + SHARE_END, end, mask=inside)
        tl.store(share_ptr + SHARE_ROW, row.to(tl.int64), mask=inside)
        tl.store(share_ptr + SHARE_SOURCE, (source * lanes + lane).to(tl.int64), mask=inside)
        for role in tl.static_range(4):
            tl.store(share_ptr + SHARE_STATES + role, tl.zeros_like(begin), mask=inside)


@triton.jit
def _describe_splits(
    record, programs, work, join_starts_ptr, joins_ptr, num_rows, joins, num_heads,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
):  # fmt: skip
    """Store a join record for a query tile that has several splits.

    The records are distributed among all these query tiles, because there may be far fewer query
    tiles than records, and the programs of records without a query tile have no work.
    """
    to_join = tl.load(join_starts_ptr + num_rows + 1)
    divisor = tl.maximum(to_join, 1)
    join = record % divisor
    row = count_at_most(join_starts_ptr + 1, num_rows, join, SEARCH_STEPS)
    tile_m = join - tl.load(join_starts_ptr + row)
    splits, _, _ = fixed_splits(work, row, TILE_N)
    shares = (joins - 1 - join) // divisor + 1
    first = fixed_partial(row, tile_m, splits, 0, programs, FIXED_SPLITS).to(tl.int32)
    _store_join(
        joins_ptr, record, first, tl.where(to_join > 0, splits, 0), row, tile_m, TILE_M,
        record // divisor, shares, work, num_heads, record < joins,
    )  # fmt: skip


@triton.jit
def _store_join(
    joins_ptr, join, first, count, row, group, group_m, share, shares, work, num_heads, inside
):
    """Store a join record, which ``combine.py`` reads, if `inside`."""
    start = tl.load(work.token_starts_ptr + row)
    pairs = (tl.load(work.token_starts_ptr + row + 1) - start) * num_heads
    join_ptr = joins_ptr + join * JOIN_WORDS
    tl.store(join_ptr + JOIN_FIRST, first, mask=inside)
    tl.store(join_ptr + JOIN_COUNT, count, mask=inside)
    tl.store(join_ptr + JOIN_START, start, mask=inside)
    tl.store(join_ptr + JOIN_FIRST_PAIR, group * group_m, mask=inside)
    tl.store(join_ptr + JOIN_ALIVE, tl.minimum(pairs - group * group_m, group_m), mask=inside)
    tl.store(join_ptr + JOIN_SHARE, share, mask=inside)
    tl.store(join_ptr + JOIN_SHARES, shares, mask=inside)
    tl.store(join_ptr + JOIN_ROOM, group_m, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "programs", "joins",
                               "stride_table_row"])  # fmt: skip
def token_kernel(
    work: Work,  # out: the shares and the tree words
    mask_starts_ptr,  # as in ``Rows``
    join_starts_ptr,  # as in ``Rows``; read with FIXED_SPLITS
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    mask: MaskLines,
    tokens: Tokens,  # out
    joins_ptr,  # out int32 [joins, JOIN_WORDS], see ``schedule.py``
    num_rows,
    num_tokens,
    programs,  # programs of the attend kernel; it has at most this many parts
    joins,  # number of join records
    num_heads,
    block_size,
    MASK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANE_STEPS: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS <= programs:
        if FIXED_SPLITS > 0:
            _describe_parts_of_splits(
                token, programs, work, num_rows, TILE_N, LANE_STEPS, SEARCH_STEPS, FIXED_SPLITS
            )
        else:
            _describe_parts(
                token, programs, work, joins_ptr, num_rows, num_heads, TILE_M, TILE_N, LANE_STEPS,
                SEARCH_STEPS,
            )  # fmt: skip
    if (FIXED_SPLITS > 0) & (tl.program_id(0) * TOKENS < joins):
        _describe_splits(
            token, programs, work, join_starts_ptr, joins_ptr, num_rows, joins, num_heads, TILE_M,
            TILE_N, SEARCH_STEPS, FIXED_SPLITS,
        )  # fmt: skip
    row = count_at_most(work.token_starts_ptr + 1, num_rows, token, SEARCH_STEPS)
    start = tl.load(work.token_starts_ptr + row)
    query_len = tl.load(work.token_starts_ptr + row + 1) - start
    seq_len = tl.load(work.row_lens_ptr + row)
    index = token - start
    # `index` is negative for tokens before the first row.
    present = (token < num_tokens) & (seq_len > 0) & (index >= 0)
    key = seq_len - query_len + index  # index of the token among the keys of its row (S-3)

    depth = index
    if TREE_WORDS > 0:
        mask_start = tl.load(mask_starts_ptr + row) if MASK != "tree:packed" else seq_len
        columns = query_len if MASK == "tree:qlen" else seq_len
        ancestors = index * 0
        bit = tl.arange(0, 32)
        for word in tl.static_range(TREE_WORDS):
            column = word * 32 + bit
            inside = present[:, None] & (column[None, :] < query_len[:, None])
            sees = _tree_bits(
                mask, token, index, column, inside, mask_start, columns, MASK,
            )  # fmt: skip
            ancestors += tl.sum(sees, axis=1)
            packed = tl.sum(sees << bit[None, :], axis=1)
            at = token.to(tl.int64) * TREE_WORDS + word
            tl.store(work.tree_words_ptr + at, packed, mask=token < num_tokens)
        depth = ancestors - 1

    # The difference is negative for queries of non-causal rows with fewer keys than queries, and
    # for nodes that do not see themselves, which no valid tree has.
    position = tl.where(present, tl.maximum(seq_len - query_len + depth, 0), 0)
    entry = row.to(tl.int64) * stride_table_row
    entry += (key // block_size).to(tl.int64) * stride_table_col
    block = tl.load(block_table_ptr + entry, mask=present & (key >= 0), other=-1).to(tl.int64)
    slot = tl.where(block >= 0, block * block_size + key % block_size, -1)
    inside = token < num_tokens
    tl.store(tokens.positions_ptr + token, position.to(tl.int64), mask=inside)
    tl.store(tokens.slot_mapping_ptr + token, slot, mask=inside)
    tl.store(tokens.is_padding_ptr + token, tl.where(present, 0, 1).to(tl.int8), mask=inside)
