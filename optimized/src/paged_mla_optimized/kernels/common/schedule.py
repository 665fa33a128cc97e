"""Index arithmetic that the plan, attend and combine kernels share.

``docs/schedule.md`` works through one step by hand.

Work is counted in *units*. One unit is one key tile of one *group* of query tiles. Starting a group
also takes time, which counts as `overhead` units before the group's key tiles. A row has
``groups * (overhead + key_tiles)`` units. The groups of a row follow each other, and the rows
follow each other. Rows without keys, and padding, have no units, so they change nothing for the
other rows (S-17).

The plan cuts the units of a step into equal ranges, one for each *part* of the grid. The programs
of a part are its *lanes*: each works on one query tile of the part's groups. For each step the plan
stores in ``cut``: the units of a part, the lanes, the units of all rows, and the overhead. For each
program it stores in ``shares`` the work range that follows from the cuts.

With FIXED_SPLITS every query tile of a row consists of *splits*. The length of a split depends on
the lengths of its row alone, and each split has its own sums (S-20). Each split has overhead before
it. A group has *padding* after it, so that rows of equal length fit the parts. ``cut`` contains the
units of a part, the lanes, the units of all rows, the padding, the overhead, and the key tiles of
each row's splits.

A cut may go through a split. The split still has one sum, which runs from its last key tile to its
first. The part after the cut starts the split as the first of its work, and stores its *state*. The
part before the cut continues from this state as the last of its work. No part is shorter than a
split. So each split is cut at most once, and a state is ready before it is needed if all programs
start together.
"""

from typing import NamedTuple

import triton
import triton.language as tl

VARYING = ("stride_table_row", "stride_lse_token", "stride_lse_head", "num_blocks")
"""Arguments of attend kernels that Triton does not specialize on.

Their values change from step to step, or with the slices that an engine takes of its buffers.
"""


class Work(NamedTuple):
    """The buffers that the plan of a step writes for the attend kernel."""

    unit_starts_ptr: tl.tensor  # int64 [B + 2]: first unit of each row
    cut_ptr: tl.tensor  # int64 [4], with FIXED_SPLITS [5 + B + 1]: words CUT_...
    shares_ptr: tl.tensor  # int64 [programs, 4], with FIXED_SPLITS [programs, 8]: words SHARE_...
    token_starts_ptr: tl.tensor  # int32 [B + 2]: first token of each row
    row_lens_ptr: tl.tensor  # int32 [B + 1]: keys of each row
    tree_words_ptr: tl.tensor  # int32 [T, TREE_WORDS]: bit mask of the drafts that each token sees


@triton.jit
def _larger(one, other):
    """Return the larger of two numbers."""
    return tl.maximum(one, other)


@triton.jit
def running_maximum(x):
    """Return, for each element of `x`, the maximum of it and of all elements before it."""
    return tl.associative_scan(x, 0, _larger)


@triton.jit
def count_at_most(ascending_ptr, length, value, SEARCH_STEPS: tl.constexpr):
    """Return how many of the `length` ascending entries are <= `value` (scalar or tensor).

    ``2 ** SEARCH_STEPS - 1`` must be at least `length`.
    """
    count = (value * 0).to(tl.int32)
    for step in tl.static_range(SEARCH_STEPS):
        candidate = count + (1 << (SEARCH_STEPS - 1 - step))
        inside = candidate <= length
        entry = tl.load(ascending_ptr + candidate - 1, mask=inside, other=0)
        count = tl.where(inside & (entry <= value), candidate, count)
    return count


@triton.jit
def place_of_part(part, parts, used):
    """Return the place of a part in a grid of `parts` parts, if the first `used` parts have work.

    The parts without work are distributed evenly among the others. Neighboring programs run in the
    same half of the device, and each half has its own path to memory. If the last four of 132
    programs had no work, 62 programs would read through one half and 66 through the other.
    """
    idle = parts - used
    of_idle = tl.cdiv((part - used + 1) * parts, tl.maximum(idle, 1)) - 1
    place = tl.where(part < used, part * parts // tl.maximum(used, 1), of_idle)
    return tl.where(part < parts, place, part)


# Words of ``cut``. The first three are the same with and without FIXED_SPLITS.

CUT_PART_UNITS = tl.constexpr(0)
CUT_LANES = tl.constexpr(1)
CUT_UNITS = tl.constexpr(2)  # units of all rows
CUT_GROUP_OVERHEAD = tl.constexpr(3)  # without FIXED_SPLITS
CUT_PADDING = tl.constexpr(3)  # padding of a group; this word and the next ones: FIXED_SPLITS
CUT_SPLIT_OVERHEAD = tl.constexpr(4)
CUT_SPLIT_TILES = tl.constexpr(5)  # key tiles of a split of the first row; other rows follow


# Words of the share of a program. The first three are the same with and without FIXED_SPLITS.

SHARE_UNIT = tl.constexpr(0)  # first unit
SHARE_END = tl.constexpr(1)  # first unit past the share
SHARE_ROW = tl.constexpr(2)  # row of the first unit
SHARE_PARTIAL = tl.constexpr(3)  # without FIXED_SPLITS: first partial query tile of the program
SHARE_SOURCE = tl.constexpr(3)  # with FIXED_SPLITS: program that starts the share's last split
SHARE_STATES = tl.constexpr(4)  # 1 if the first role has stored its state; other roles follow


@triton.constexpr_function
def words_of_share(has_fixed_splits):
    """Return how many words the share of a program has: 8 with FIXED_SPLITS, otherwise 4."""
    return 8 if has_fixed_splits else 4


@triton.jit
def share_of(work, program, FIXED_SPLITS: tl.constexpr):
    """Return the pointer to the words of a program's share."""
    return work.shares_ptr + program * words_of_share(FIXED_SPLITS > 0)


# Words of a join record, which describes the work of programs of ``combine.py``.

JOIN_WORDS = tl.constexpr(8)
JOIN_FIRST = tl.constexpr(0)  # first part with a partial; with FIXED_SPLITS the first partial
JOIN_COUNT = tl.constexpr(1)  # number of partials; 0: this record joins nothing
JOIN_START = tl.constexpr(2)  # first token of the row
JOIN_FIRST_PAIR = tl.constexpr(3)  # first pair, counted in the row
JOIN_ALIVE = tl.constexpr(4)  # pairs that exist
JOIN_SHARE = tl.constexpr(5)  # number of this record among those of the same group
JOIN_SHARES = tl.constexpr(6)  # number of records of the same group
JOIN_ROOM = tl.constexpr(7)  # pairs that a partial has space for


@triton.jit
def share_of_program(work, FIXED_SPLITS: tl.constexpr):
    """Return the units ``[unit, end)`` of this program, and the row of the first unit."""
    share_ptr = share_of(work, tl.program_id(0), FIXED_SPLITS)
    unit, end = tl.load(share_ptr + SHARE_UNIT), tl.load(share_ptr + SHARE_END)
    return unit, end, tl.load(share_ptr + SHARE_ROW).to(tl.int32)


@triton.jit
def partial_of_program(work, is_head):
    """Return the partial query tile that this program writes for a segment.

    Each program may write two partials: that of a group that its part starts (`is_head`) and does
    not finish, and that of a group that an earlier part started.
    """
    tile = tl.load(share_of(work, tl.program_id(0), 0) + SHARE_PARTIAL)
    return tile + tl.where(is_head, lanes_of_group(work), 0)


@triton.jit
def lanes_of_group(work):
    """Return how many query tiles a group has."""
    return tl.load(work.cut_ptr + CUT_LANES).to(tl.int32)


@triton.jit
def row_of_unit(work, row, unit):
    """Return the row that owns `unit`; it is `row` or a later one."""
    while tl.load(work.unit_starts_ptr + row + 1) <= unit:
        row += 1
    return row


@triton.jit
def group_of_unit(work, row, unit, TILE_N: tl.constexpr):
    """Return which group of `row` owns `unit`, and the units ``[begin, end)`` of its key tiles."""
    row_begin = tl.load(work.unit_starts_ptr + row)
    key_tiles = tl.maximum(tl.cdiv(tl.load(work.row_lens_ptr + row), TILE_N), 1)
    overhead = tl.load(work.cut_ptr + CUT_GROUP_OVERHEAD).to(tl.int32)
    units = key_tiles + overhead
    group = ((unit - row_begin) // units).to(tl.int32)
    begin = row_begin + group.to(tl.int64) * units + overhead
    return group, begin, begin + key_tiles


@triton.jit
def unit_after(work, stop, group_end):
    """Return the unit of the first key tile at or after `stop`, past the overhead of a group."""
    return stop + tl.where(stop == group_end, tl.load(work.cut_ptr + CUT_GROUP_OVERHEAD), 0)


@triton.jit
def seen_tiles(
    work, row, tile_m, num_heads, origin, begin, end, MASK: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return which key tiles of units ``[begin, end)`` a query tile sees (S-4).

    `origin` is the unit of the row's first key tile.

    Returns
    -------
    seq_len, context_len
        Keys of the row, and keys before its first query token.
    tile_begin, tile_end
        The range of key tiles that some query sees.
    tile_edge
        First key tile that some query does not see in full.
    """
    seq_len = tl.load(work.row_lens_ptr + row)
    query_len = tl.load(work.token_starts_ptr + row + 1) - tl.load(work.token_starts_ptr + row)
    context_len = seq_len - query_len  # negative in short non-causal rows
    first = tile_m * TILE_M // num_heads
    last = tl.minimum((tile_m * TILE_M + TILE_M - 1) // num_heads, query_len - 1)
    # Every query of the tile sees keys [0, common), and no query sees keys at or past `reach`.
    if MASK == "causal":
        common = tl.minimum(context_len + first + 1, seq_len)
        reach = tl.minimum(context_len + last + 1, seq_len)
    elif MASK == "non_causal":
        common = seq_len
        reach = seq_len
    else:
        common = context_len
        reach = seq_len
    reach = tl.where(first < query_len, reach, 0)
    # The subtraction comes after the minimum: ptxas 12.8 miscompiles the 32-bit minimum of a
    # difference to that of a sum if both numbers are in uniform registers.
    end = tl.minimum(end, origin + tl.cdiv(reach, TILE_N))
    tile_begin, tile_end = (begin - origin).to(tl.int32), (end - origin).to(tl.int32)
    return seq_len, context_len, tile_begin, tile_end, common // TILE_N


@triton.jit
def visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS: tl.constexpr):
    """Return the key tile of iteration `visit` of a segment; `visit` starts at `tile_begin`.

    For a `visit` past the last one it is any tile of the row. A maximum would be correct too, but
    the values that depend on it would not stay in uniform registers.
    """
    if FIXED_SPLITS > 0:
        visit = tl.where(visit < tile_end, tile_begin + tile_end - 1 - visit, 0)
    return visit


@triton.jit
def fixed_splits(work, row, TILE_N: tl.constexpr):
    """Return the splits of each query tile of a row, and their lengths.

    Returns
    -------
    splits
        Number of splits of a query tile.
    length
        Key tiles of each split except the last one.
    key_tiles
        Key tiles of the row, at least 1.
    """
    length = tl.load(work.cut_ptr + CUT_SPLIT_TILES + row).to(tl.int32)
    key_tiles = tl.maximum(tl.cdiv(tl.load(work.row_lens_ptr + row), TILE_N), 1)
    return tl.cdiv(key_tiles, length), length, key_tiles


@triton.jit
def split_of_unit(work, row, unit, TILE_N: tl.constexpr):
    """Return which split of `row` owns `unit`.

    Returns
    -------
    group, splits, split
        The group of the split, the number of splits of that group, and the number of this split.
    first_tile
        First key tile of the split.
    before, begin, end, after
        The split owns units [before, after), with overhead and padding. Units [begin, end) are its
        key tiles.
    """
    splits, length, key_tiles = fixed_splits(work, row, TILE_N)
    padding = tl.load(work.cut_ptr + CUT_PADDING).to(tl.int32)
    overhead = tl.load(work.cut_ptr + CUT_SPLIT_OVERHEAD).to(tl.int32)
    units = splits * overhead + key_tiles + padding
    row_begin = tl.load(work.unit_starts_ptr + row)
    group = ((unit - row_begin) // units).to(tl.int32)
    group_begin = row_begin + group.to(tl.int64) * units
    inside = (unit - group_begin).to(tl.int32)
    split = tl.minimum(inside // (overhead + length), splits - 1)
    first_tile = split * length
    before = group_begin + split * (overhead + length)
    begin = before + overhead
    end = begin + tl.minimum(length, key_tiles - first_tile)
    after = tl.where(split == splits - 1, group_begin + units, end)
    return group, splits, split, first_tile, before, begin, end, after


@triton.jit
def fixed_partial(row, tile_m, splits, split, programs, FIXED_SPLITS: tl.constexpr):
    """Return the partial query tile (int64) that stores the result of a split.

    The first two partial query tiles of each program store its state, see ``split_handoff.py``.
    """
    return (2 * programs + row * FIXED_SPLITS + tile_m * splits + split).to(tl.int64)


@triton.jit
def query_rows(work, row, tile, num_heads, TILE_M: tl.constexpr):
    """Return the (token, head) pairs of a query tile of a row.

    Returns
    -------
    token, head : int64 [TILE_M]
    index : [TILE_M]
        Index of the token in the row.
    live : bool [TILE_M]
        Whether the pair exists.
    """
    start = tl.load(work.token_starts_ptr + row)
    query_len = tl.load(work.token_starts_ptr + row + 1) - start
    pair = tile * TILE_M + tl.arange(0, TILE_M)
    index = pair // num_heads
    return (start + index).to(tl.int64), (pair % num_heads).to(tl.int64), index, index < query_len
