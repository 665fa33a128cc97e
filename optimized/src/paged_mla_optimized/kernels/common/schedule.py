"""Index arithmetic that the plan, attend and combine kernels must agree on.

``docs/schedule.md`` works one step by hand.

Work is counted in *units*. One unit is one key tile of one *group* of query tiles; beginning a
group takes time too, which counts as `overhead` units in front of its key tiles. A row has
``groups * (overhead + key_tiles)`` units, the groups of a row follow each other, and so do the
rows. Rows without keys, and padding, have no units, so that they change nothing for the others
(S-17).

The units of a step are cut into equal ranges, one for each *part* of the grid, whose programs are
its *lanes*: each takes one query tile of the part's groups. The plan chooses for each step, and
leaves in ``cut``: units of a part, lanes, all units, overhead. What that means for a program it
leaves in ``shares``.

With FIXED_SPLITS every query tile of a row is made of *splits*, whose length depends on that row's
lengths alone, and each split is a sum of its own (S-20). Overhead lies in front of each, and behind
a group *padding*, which makes rows that are as long fit the parts. ``cut`` holds: units of a part,
lanes, all units, padding, overhead, and the key tiles of each row's splits. A split that a cut goes
through is still one sum, taken from its last key tile to its first: the part behind the cut begins
it, as the first of what it does, and leaves its *state*; the part before the cut goes on with that,
as the last of what it does. No part is shorter than a split, so that a state is there before it is
needed if all begin together, and each split is cut once at most.
"""

from typing import NamedTuple

import triton
import triton.language as tl

VARYING = ("stride_table_row", "stride_lse_token", "stride_lse_head", "num_blocks")
"""Arguments of attend kernels that Triton does not specialise on.

They vary from step to step, or with how an engine slices its buffers.
"""


class Work(NamedTuple):
    """What the plan of a step leaves for its kernels."""

    unit_starts_ptr: tl.tensor  # int64 [B + 2]: of rows
    cut_ptr: tl.tensor  # int64
    shares_ptr: tl.tensor  # int64 [programs, 4], with FIXED_SPLITS [programs, 8]
    token_starts_ptr: tl.tensor  # int32 [B + 2]: of rows
    row_lens_ptr: tl.tensor  # int32 [B + 1]
    tree_words_ptr: tl.tensor  # int32 [T, TREE_WORDS]: which drafts each token sees


@triton.jit
def _larger(one, other):
    return tl.maximum(one, other)


@triton.jit
def running_maximum(x):
    """Return for each element of a line the largest of it and of those before it."""
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
    """Return where a part lies in a grid of `parts`, the first `used` of which have work.

    Those without lie evenly among them. Programs that follow each other run in one half of the
    device, and each half has its own way to memory: were the last four of 132 programs without
    work, 62 would read through one half and 66 through the other.
    """
    idle = parts - used
    of_idle = tl.cdiv((part - used + 1) * parts, tl.maximum(idle, 1)) - 1
    place = tl.where(part < used, part * parts // tl.maximum(used, 1), of_idle)
    return tl.where(part < parts, place, part)


# Words of ``cut``. With FIXED_SPLITS those past the first three are others.

CUT_PART_UNITS = tl.constexpr(0)
CUT_LANES = tl.constexpr(1)
CUT_UNITS = tl.constexpr(2)  # of all rows
CUT_GROUP_OVERHEAD = tl.constexpr(3)
CUT_PADDING = tl.constexpr(3)  # of a group
CUT_SPLIT_OVERHEAD = tl.constexpr(4)
CUT_SPLIT_TILES = tl.constexpr(5)  # key tiles of a split of the first row; other rows follow


# Words of the share of a program. With FIXED_SPLITS the fourth is another, and states follow.

SHARE_UNIT = tl.constexpr(0)  # the first
SHARE_END = tl.constexpr(1)  # first unit past the share
SHARE_ROW = tl.constexpr(2)  # of the first unit
SHARE_PARTIAL = tl.constexpr(3)  # first partial query tile of the program
SHARE_SOURCE = tl.constexpr(3)  # program that begins the share's last split
SHARE_STATES = tl.constexpr(4)  # whether the first role has left its state; other roles follow


@triton.constexpr_function
def words_of_share(has_fixed_splits):
    """Return how many words the share of a program has: with FIXED_SPLITS those of states too."""
    return 8 if has_fixed_splits else 4


@triton.jit
def share_of(work, program, FIXED_SPLITS: tl.constexpr):
    """Return where the words of a program's share lie."""
    return work.shares_ptr + program * words_of_share(FIXED_SPLITS > 0)


# Words of a join, which says what a program of ``combine.py`` adds up.

JOIN_WORDS = tl.constexpr(8)
JOIN_FIRST = tl.constexpr(0)  # part or split that left the first partial
JOIN_COUNT = tl.constexpr(1)  # of partials; 0: there is nothing to join
JOIN_START = tl.constexpr(2)  # first token of the row
JOIN_FIRST_PAIR = tl.constexpr(3)  # of the row's pairs
JOIN_ALIVE = tl.constexpr(4)  # pairs that exist
JOIN_SHARE = tl.constexpr(5)  # which of the shares of the work is this join's
JOIN_SHARES = tl.constexpr(6)
JOIN_ROOM = tl.constexpr(7)  # pairs that a partial has room for


@triton.jit
def share_of_program(work, FIXED_SPLITS: tl.constexpr):
    """Return the units ``[unit, end)`` of this program, and the row of the first."""
    share_ptr = share_of(work, tl.program_id(0), FIXED_SPLITS)
    unit, end = tl.load(share_ptr + SHARE_UNIT), tl.load(share_ptr + SHARE_END)
    return unit, end, tl.load(share_ptr + SHARE_ROW).to(tl.int32)


@triton.jit
def partial_of_program(work, is_head):
    """Return which partial query tile this program writes.

    Each program may leave two: of the group that its part begins (`is_head`) and does not end, and
    of one that began in an earlier part.
    """
    tile = tl.load(share_of(work, tl.program_id(0), 0) + SHARE_PARTIAL)
    return tile + tl.where(is_head, lanes_of_group(work), 0)


@triton.jit
def lanes_of_group(work):
    """Return how many query tiles a group has."""
    return tl.load(work.cut_ptr + CUT_LANES).to(tl.int32)


@triton.jit
def row_of_unit(work, row, unit):
    """Return the row that owns `unit`, which is `row` or one after it."""
    while tl.load(work.unit_starts_ptr + row + 1) <= unit:
        row += 1
    return row


@triton.jit
def group_of_unit(work, row, unit, TILE_N: tl.constexpr):
    """Return which group of `row` owns `unit`, and the units ``[begin, end)`` of its tiles."""
    row_begin = tl.load(work.unit_starts_ptr + row)
    key_tiles = tl.maximum(tl.cdiv(tl.load(work.row_lens_ptr + row), TILE_N), 1)
    overhead = tl.load(work.cut_ptr + CUT_GROUP_OVERHEAD).to(tl.int32)
    units = key_tiles + overhead
    group = ((unit - row_begin) // units).to(tl.int32)
    begin = row_begin + group.to(tl.int64) * units + overhead
    return group, begin, begin + key_tiles


@triton.jit
def unit_after(work, stop, group_end):
    """Return the unit of the next tile after `stop`, past what beginning a group costs."""
    return stop + tl.where(stop == group_end, tl.load(work.cut_ptr + CUT_GROUP_OVERHEAD), 0)


@triton.jit
def seen_tiles(
    work, row, tile_m, num_heads, origin, begin, end, MASK: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):  # fmt: skip
    """Return what a query tile sees of the key tiles that units ``[begin, end)`` are (S-4).

    `origin` is the unit of the row's first key tile.

    Returns
    -------
    seq_len, context_len
    tile_begin, tile_end : the tiles that some query sees
    tile_edge : first tile that some query does not see in full
    """
    seq_len = tl.load(work.row_lens_ptr + row)
    query_len = tl.load(work.token_starts_ptr + row + 1) - tl.load(work.token_starts_ptr + row)
    context_len = seq_len - query_len  # below 0 in short non-causal rows
    first = tile_m * TILE_M // num_heads
    last = tl.minimum((tile_m * TILE_M + TILE_M - 1) // num_heads, query_len - 1)
    # Keys [0, common) are seen by every query of the tile, none at or past `reach` by any.
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
    # The difference comes last: of the 32-bit minimum of a difference, ptxas 12.8 makes that of a
    # sum where both numbers are in uniform registers.
    end = tl.minimum(end, origin + tl.cdiv(reach, TILE_N))
    tile_begin, tile_end = (begin - origin).to(tl.int32), (end - origin).to(tl.int32)
    return seq_len, context_len, tile_begin, tile_end, common // TILE_N


@triton.jit
def visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS: tl.constexpr):
    """Return the key tile of a segment that comes `visit` - `tile_begin` tiles after its first.

    Past the last visit it is some tile of the row. A maximum would do too, but takes what is found
    from it out of uniform registers.
    """
    if FIXED_SPLITS > 0:
        visit = tl.where(visit < tile_end, tile_begin + tile_end - 1 - visit, 0)
    return visit


@triton.jit
def fixed_splits(work, row, TILE_N: tl.constexpr):
    """Return splits of each query tile of a row, key tiles of each but the last, and of all."""
    length = tl.load(work.cut_ptr + CUT_SPLIT_TILES + row).to(tl.int32)
    key_tiles = tl.maximum(tl.cdiv(tl.load(work.row_lens_ptr + row), TILE_N), 1)
    return tl.cdiv(key_tiles, length), length, key_tiles


@triton.jit
def split_of_unit(work, row, unit, TILE_N: tl.constexpr):
    """Return which split of `row` owns `unit`, what counts beside its key tiles included.

    Returns
    -------
    group, splits, split : its group, how many splits that has, and which of them it is
    first_tile : its first key tile
    before, begin, end, after : units [begin, end) are its key tiles, [before, after) are its own
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
    """Return which partial query tile a split of a row's query tile is kept in, int64.

    In front of them lie those of states, see ``handover.py``.
    """
    return (2 * programs + row * FIXED_SPLITS + tile_m * splits + split).to(tl.int64)


@triton.jit
def query_rows(work, row, tile, num_heads, TILE_M: tl.constexpr):
    """Unfold one query tile of a row into (token, head) pairs.

    Returns token and head int64, index within the row, and which pairs exist; all [TILE_M].
    """
    start = tl.load(work.token_starts_ptr + row)
    query_len = tl.load(work.token_starts_ptr + row + 1) - start
    pair = tile * TILE_M + tl.arange(0, TILE_M)
    index = pair // num_heads
    return (start + index).to(tl.int64), (pair % num_heads).to(tl.int64), index, index < query_len
