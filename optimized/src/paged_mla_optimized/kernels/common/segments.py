"""Find the segments of a program.

A *segment* is the piece of one group of query tiles that one part of the grid works on (see
``schedule.py``). Every role of a kernel iterates over the same segments and the same key tiles.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.schedule import (
    fixed_partial,
    group_of_unit,
    lanes_of_group,
    partial_of_program,
    row_of_unit,
    seen_tiles,
    share_of_program,
    split_of_unit,
    unit_after,
    visited_tile,
)


class Tiles(NamedTuple):
    """The tile sizes that the ``Work`` of a step is counted in, and the mask of the step."""

    num_heads: tl.constexpr
    MASK: tl.constexpr
    TREE_WORDS: tl.constexpr
    TILE_M: tl.constexpr
    TILE_N: tl.constexpr
    FIXED_SPLITS: tl.constexpr  # most splits of a row; 0: the splits follow the grid's ranges


class Step(NamedTuple):
    """``Work`` and ``Tiles`` of a step.

    A kernel passes a record with constants directly to a function, without assigning it to a
    variable: the constants of an assigned record are no longer constants to the compiler.
    """

    unit_starts_ptr: tl.tensor
    cut_ptr: tl.tensor
    shares_ptr: tl.tensor
    token_starts_ptr: tl.tensor
    row_lens_ptr: tl.tensor
    tree_words_ptr: tl.tensor
    num_heads: tl.constexpr
    MASK: tl.constexpr
    TREE_WORDS: tl.constexpr
    TILE_M: tl.constexpr
    TILE_N: tl.constexpr
    FIXED_SPLITS: tl.constexpr


class Segment(NamedTuple):
    """A piece of work; with FIXED_SPLITS it is one split, or one side of a split that is cut."""

    next_unit: tl.tensor  # unit of the first key tile after the segment
    is_head: tl.tensor  # without FIXED_SPLITS: whether the segment starts its group
    partial: tl.tensor  # with FIXED_SPLITS: partial query tile that stores the result of the split
    is_whole: tl.tensor  # whether the segment is the whole group
    suspends: tl.tensor  # whether another program continues the sums of this segment
    resumes: tl.tensor  # whether this segment continues the sums of another program
    row: tl.tensor  # row of the queries
    tile_m: tl.tensor  # query tile, counted in the row
    seq_len: tl.tensor
    context_len: tl.tensor
    tile_begin: tl.tensor  # key tiles [tile_begin, tile_end) are those that some query sees
    tile_end: tl.tensor
    tile_edge: tl.tensor  # first key tile that some query does not see in full


@triton.jit
def program_work_range(step):
    """Return the units ``[unit, end)`` of this program, and the row of the first unit."""
    return share_of_program(step, step.FIXED_SPLITS)


@triton.jit
def find_segment(step, unit, end, row):
    """Return the segment that starts with `unit`; its row is `row` or a later one.

    `end` is the first unit after the work range of the program.
    """
    row = row_of_unit(step, row, unit)
    lanes = lanes_of_group(step)
    if step.FIXED_SPLITS > 0:
        group, splits, split, first_tile, _, split_begin, split_end, after = split_of_unit(
            step, row, unit, step.TILE_N
        )
        tile_m = group * lanes + tl.program_id(0) % lanes
        partial = fixed_partial(row, tile_m, splits, split, tl.num_programs(0), step.FIXED_SPLITS)
        partial = partial.to(tl.int32)
        is_head = False
        is_whole = splits == 1
        unit = tl.maximum(unit, split_begin)
        stop = tl.minimum(end, split_end)
        suspends = unit > split_begin
        resumes = stop < split_end
        origin = split_begin - first_tile  # unit of the group's key tile 0 if it had one split only
        next_unit = after  # at or past `end` if the segment is resumed
    else:
        group, origin, group_end = group_of_unit(step, row, unit, step.TILE_N)
        tile_m = group * lanes + tl.program_id(0) % lanes
        is_head = unit == origin
        partial = 0
        stop = tl.minimum(end, group_end)
        is_whole = is_head & (stop == group_end)
        suspends = False
        resumes = False
        next_unit = unit_after(step, stop, group_end)
    seq_len, context_len, tile_begin, tile_end, tile_edge = seen_tiles(
        step, row, tile_m, step.num_heads, origin, unit, stop, step.MASK, step.TILE_M,
        step.TILE_N,
    )  # fmt: skip
    return Segment(
        next_unit, is_head, partial, is_whole, suspends, resumes, row, tile_m, seq_len,
        context_len, tile_begin, tile_end, tile_edge,
    )  # fmt: skip


@triton.jit
def tile_of_visit(step, segment, visit):
    """Return the key tile of iteration `visit`, which counts from `tile_begin` to `tile_end`."""
    return visited_tile(visit, segment.tile_begin, segment.tile_end, step.FIXED_SPLITS)


@triton.jit
def partial_of_segment(work, segment, FIXED_SPLITS: tl.constexpr):
    """Return the partial query tile that stores the result of a segment that is not whole."""
    tile = segment.partial
    if FIXED_SPLITS == 0:
        tile = partial_of_program(work, segment.is_head)
    return tile
