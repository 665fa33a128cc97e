"""Index arithmetic that the plan, attend and combine kernels must agree on.

Work is counted in *units*: one unit is one key tile of one *group* of query tiles. A row has
``groups * key_tiles`` units, the groups of a row follow each other, and so do the rows. Rows
without keys, and padding, have no units, so that they change nothing for the others (S-17).

The units of a step are cut into equal ranges, one for each *part* of the grid, whose programs are
its *lanes*: each takes one query tile of the part's groups. The plan chooses both numbers for each
step and leaves them in ``cut``: units of a part, lanes. With FIXED_SPLITS the cuts follow the rows
instead: a group is made of *splits*, whose length depends on its own row's lengths alone, and a
part owns the splits that begin in its range (S-20).
"""

import triton
import triton.language as tl


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
def units_of_part(unit_starts_ptr, cut_ptr, num_rows, part):
    """Return the unit range ``[begin, end)`` of one part, the units of all, and its length."""
    total = tl.load(unit_starts_ptr + num_rows + 1)
    length = tl.load(cut_ptr)
    begin = tl.minimum(part * length, total)
    end = tl.minimum(begin + length, total)
    return begin, end, total, length


@triton.jit
def lanes_of_group(cut_ptr):
    """Return how many query tiles a group has."""
    return tl.load(cut_ptr + 1).to(tl.int32)


@triton.jit
def find_group(
    unit_starts_ptr,
    seq_lens_ptr,
    num_rows,
    unit,
    TILE_N: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """Return the row and group that own `unit`, and the group's unit range ``[begin, end)``."""
    row = count_at_most(unit_starts_ptr + 1, num_rows, unit, SEARCH_STEPS)
    row_begin = tl.load(unit_starts_ptr + row)
    key_tiles = tl.cdiv(tl.load(seq_lens_ptr + row), TILE_N)
    group = (unit - row_begin) // key_tiles
    begin = row_begin + group * key_tiles
    return row, group.to(tl.int32), begin, begin + key_tiles


@triton.jit
def fixed_split(
    token_starts_ptr,
    row_lens_ptr,
    row,
    num_heads,
    group_m,
    TILE_N: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,
):
    """Return groups of a row, splits of each group, and key tiles of each split but the last.

    A row has at most FIXED_SPLITS splits in all, unless it has more groups than that.
    """
    query_len = tl.load(token_starts_ptr + row + 1) - tl.load(token_starts_ptr + row)
    groups = tl.maximum(tl.cdiv(query_len * num_heads, group_m), 1)
    key_tiles = tl.maximum(tl.cdiv(tl.load(row_lens_ptr + row), TILE_N), 1)
    most = tl.maximum(FIXED_SPLITS // groups, 1)
    length = tl.cdiv(key_tiles, tl.minimum(tl.cdiv(key_tiles, SPLIT_TILES), most))
    return groups, tl.cdiv(key_tiles, length), length


@triton.jit
def query_rows(token_starts_ptr, row, tile, num_heads, TILE_M: tl.constexpr):
    """Unfold one query tile of a row into (token, head) pairs.

    Returns token and head int64, index within the row, and which pairs exist; all [TILE_M].
    """
    start = tl.load(token_starts_ptr + row)
    query_len = tl.load(token_starts_ptr + row + 1) - start
    pair = tile * TILE_M + tl.arange(0, TILE_M)
    index = pair // num_heads
    return (start + index).to(tl.int64), (pair % num_heads).to(tl.int64), index, index < query_len
