"""What one step needs to know about itself, derived on the device (rules S-1, S-2, S-3, S-14).

The first program of `schedule_kernel` turns lengths into prefix sums; the others build the block
table, where the engine brings a request map. Row `num_rows` is a pseudo-row
of length 0 that owns the padded tokens. `token_kernel` gives every token its position and slot
and packs its line of the draft tree; it also finds the share of each program of the grid.

Lengths, tables and masks come from the engine's device memory, and may hold anything. All later
kernels of a step address memory by what is written here, so a row that rule S-2 does not allow is
made a padded row here: `row_lens` is 0 for it.
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

_MOST_ELEMENTS = tl.constexpr(2**40)  # of a row's matrix: no sum of such passes an int64


class Lengths(NamedTuple):
    """The rows of a step, as the engine gives them."""

    cu_seqlens_q_ptr: tl.tensor  # int32 [B + 1]
    seq_lens_ptr: tl.tensor  # int32 [B]
    stride_cu: tl.tensor
    stride_lens: tl.tensor


class Requests(NamedTuple):
    """A request map, read by all programs of the schedule but the first."""

    req_to_token_ptr: tl.tensor  # int32 [requests, tokens]
    request_ids_ptr: tl.tensor  # [B]
    stride_request: tl.tensor
    stride_slot: tl.tensor
    stride_ids: tl.tensor


class Rows(NamedTuple):
    """What the schedule writes of each row, and how the step is cut."""

    token_starts_ptr: tl.tensor  # int32 [B + 2]
    row_lens_ptr: tl.tensor  # int32 [B + 1]
    key_starts_ptr: tl.tensor  # int32 [B + 2], at most 2 ** 31 - 1
    first_tokens_ptr: tl.tensor  # int32 [B], zeros
    unit_starts_ptr: tl.tensor  # int64 [B + 2]
    cut_ptr: tl.tensor  # int64 [4], with FIXED_SPLITS [5 + B + 1]: see ``schedule.py``
    join_starts_ptr: tl.tensor  # int32 [B + 2], with FIXED_SPLITS: query tiles to join
    mask_starts_ptr: tl.tensor  # int64 [B + 1]: first of a row's tree matrix that speaks of drafts


class Tokens(NamedTuple):
    """What is written of each token."""

    positions_ptr: tl.tensor  # int64 [T]
    slot_mapping_ptr: tl.tensor  # int64 [T]
    is_padding_ptr: tl.tensor  # int8 [T]


class MaskLines(NamedTuple):
    """A draft tree in the problem's spelling."""

    ptr: tl.tensor  # uint8
    stride_line: tl.tensor
    stride_element: tl.tensor


@triton.jit
def _build_table(
    program, requests, seq_lens_ptr, stride_lens, table_ptr, block_size, width, fill, longest,
    num_requests, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Write ENTRIES entries of one row's block table; past the row they are `fill`.

    An entry is -1 where the map holds no slot. Rows that the schedule makes padded rows because of
    their length or request have `fill` alone.
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
    """Return the most lanes, up to ``2 ** LANE_STEPS``, that leave few without a query tile.

    More lanes read a key less often, but a group with fewer query tiles than lanes idles the rest.
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
    """Return the units of a part, the overhead of each group, and whether rows are as long.

    The length is an equal share of all units. Where all rows are as long it may be more, by SLACK
    32nds, so that cuts fall between rows or at equal places in each: parts are then less even, but
    leave fewer partial answers and begin fewer groups. All of them begin as many, so no overhead is
    counted but what makes the pieces of a row as long as each other. Otherwise each of a row's
    `starts` counts, of its groups or of their splits.
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
    """Return how many splits each query tile of a row has, and the key tiles of each but the last.

    A row is cut for ROW_SHARE programs, into splits of MIN_UNITS to SPLIT_TILES key tiles, twice as
    many from four query tiles on, whose lanes leave fewer parts. All its query tiles together have
    at most FIXED_SPLITS of them, or one each.
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
    """Load the rows of a step; those that S-2 does not allow have no keys.

    Tokens at or past `num_tokens` are cut off; those before them keep their positions.

    Returns
    -------
    starts, query_lens : first token and tokens of each row; rows follow each other in the step
    seq_lens : 0 for padded rows
    first_elements : of each row's tree matrix, the first element that speaks of drafts
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
    first_elements = starts.to(tl.int64)  # of no use without a flat mask
    if MASK == "tree:qlen" or MASK == "tree:full":
        ascends = given_ends > given_starts  # a difference past int32 may wrap to either sign
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
    table_ptr,  # out int32 [B, width]
    num_rows,
    num_tokens,
    num_heads,
    block_size,
    width,
    fill,
    longest,  # tokens of a row, at most: what the model, the block table and the map allow
    num_requests,  # of the request map; -1 without one
    max_draft_tokens,
    mask_elements: tl.int64,  # of a flat mask
    MASK: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    LANE_STEPS: tl.constexpr,  # doublings of one lane, at most
    PROGRAMS: tl.constexpr,  # of the attend kernel
    MIN_UNITS: tl.constexpr,
    OVERHEAD: tl.constexpr,  # key tiles that beginning a group is worth
    SLACK: tl.constexpr,  # 32nds by which parts may be longer, so that rows are cut alike
    SPLIT_TILES: tl.constexpr,
    ROW_SHARE: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,  # most splits of a row; 0: the grid's ranges cut
    ROWS: tl.constexpr,  # power of two >= B + 2
    ENTRIES: tl.constexpr,  # table entries of one program
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
        # Pieces of rows that are as long are no shorter than their splits.
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
    """Return 0 or 1 for (token, draft node) pairs in any spelling, int32 [TOKENS, 32]."""
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
    """Find where parts begin, which programs work on them, and what their beginnings cut."""
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
    """Return where a part ends that is cut at `unit`, where the next begins, and in which row.

    Those differ where the cut falls on what counts beside key tiles.
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
    """Find where parts begin and end, which programs work on them, and who begins their last split.

    Parts lie in the grid in reverse: a program waits for the one that begins its last split, and
    programs that come earlier are the first to be started.
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
    """Share out the query tiles that have several splits among all records of `joins_ptr`.

    There may be far fewer of them than records, whose programs would then do nothing.
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
    """Store what ``combine.py`` reads of a join."""
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
    work: Work,  # out: its shares and tree words
    mask_starts_ptr,  # as in ``Rows``
    join_starts_ptr,  # as in ``Rows``, read with FIXED_SPLITS
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    mask: MaskLines,
    tokens: Tokens,  # out
    joins_ptr,  # out int32 [joins, 8], see ``combine.py``
    num_rows,
    num_tokens,
    programs,  # of the attend kernel: it has at most so many parts
    joins,  # records of `joins_ptr` to fill
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
    present = (token < num_tokens) & (seq_len > 0) & (index >= 0)  # none in front of the first row
    key = seq_len - query_len + index  # where the token lies in its row: S-3, "index"

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

    # In front of the first position are queries of a row with fewer keys than queries, which is
    # not causal; and nodes that do not see themselves, which no tree has.
    position = tl.where(present, tl.maximum(seq_len - query_len + depth, 0), 0)
    entry = row.to(tl.int64) * stride_table_row
    entry += (key // block_size).to(tl.int64) * stride_table_col
    block = tl.load(block_table_ptr + entry, mask=present & (key >= 0), other=-1).to(tl.int64)
    slot = tl.where(block >= 0, block * block_size + key % block_size, -1)
    inside = token < num_tokens
    tl.store(tokens.positions_ptr + token, position.to(tl.int64), mask=inside)
    tl.store(tokens.slot_mapping_ptr + token, slot, mask=inside)
    tl.store(tokens.is_padding_ptr + token, tl.where(present, 0, 1).to(tl.int8), mask=inside)
