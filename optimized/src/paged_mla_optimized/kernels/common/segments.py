"""The pieces of work that a program walks.

A *segment* is the piece of one group of query tiles that one part of the grid works on (see
``schedule.py``). Every role of a kernel walks the same segments and counts the same key tiles.
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
    """The tiles that the ``Work`` of a step is counted in, and what its queries see of them."""

    num_heads: tl.constexpr
    MASK: tl.constexpr
    TREE_WORDS: tl.constexpr
    TILE_M: tl.constexpr
    TILE_N: tl.constexpr
    FIXED_SPLITS: tl.constexpr  # most splits of a row; 0: the grid's ranges cut


class Step(NamedTuple):
    """``Work`` and ``Tiles`` of a step.

    Records with constants are handed on as they are made: what a kernel gives a name to is no
    constant any more.
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
    """A piece of work; with FIXED_SPLITS it is one split, or what a cut leaves of one."""

    next_unit: tl.tensor  # unit of the tile after it
    is_head: tl.tensor  # whether it begins its group; without FIXED_SPLITS
    partial: tl.tensor  # the partial query tile that its split is kept in; with FIXED_SPLITS
    is_whole: tl.tensor  # whether it is all of its group
    suspends: tl.tensor  # whether another program goes on with its sums
    resumes: tl.tensor  # whether it goes on with those of another
    row: tl.tensor  # whose queries
    tile_m: tl.tensor  # which query tile of the row
    seq_len: tl.tensor
    context_len: tl.tensor
    tile_begin: tl.tensor  # its key tiles that some query sees
    tile_end: tl.tensor
    tile_edge: tl.tensor  # first key tile that some query does not see in full


@triton.jit
def program_work_range(step):
    """Return the units ``[unit, end)`` of this program, and the row of the first."""
    return share_of_program(step, step.FIXED_SPLITS)


@triton.jit
def find_segment(step, unit, end, row):
    """Return the segment of a part that starts with `unit`, of `row` or one after it."""
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
        origin = split_begin - first_tile  # unit of the group's first key tile, were it one split
        next_unit = after  # past `end` where this is taken
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
    """Return the key tile that is visited `visit` - `tile_begin` tiles after the first."""
    return visited_tile(visit, segment.tile_begin, segment.tile_end, step.FIXED_SPLITS)


@triton.jit
def partial_of_segment(work, segment, FIXED_SPLITS: tl.constexpr):
    """Return which partial query tile a segment that is not whole is kept in."""
    tile = segment.partial
    if FIXED_SPLITS == 0:
        tile = partial_of_program(work, segment.is_head)
    return tile
