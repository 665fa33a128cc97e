"""The pieces of work that every role of a Hopper kernel walks, and which pairs they have.

A *segment* is the piece of one group of query tiles that one part of the grid works on (see
``schedule.py``). Every role of a kernel walks the same segments and counts the same key tiles.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.handover import (
    await_state,
    forget_state,
    leave_state,
    state_of_program,
)
from paged_mla_optimized.kernels.common.opaque import opaque
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
from paged_mla_optimized.kernels.hopper.barrier import thread_barrier


class Step(NamedTuple):
    """The ``Work`` of a step, and the tiles it is counted in.

    Records with constants are handed on as they are made: what a kernel gives a name to is no
    constant any more.
    """

    unit_starts_ptr: gl.tensor
    cut_ptr: gl.tensor
    shares_ptr: gl.tensor
    token_starts_ptr: gl.tensor
    row_lens_ptr: gl.tensor
    tree_words_ptr: gl.tensor  # int32 [T, TREE_WORDS]
    num_heads: gl.constexpr
    MASK: gl.constexpr
    TREE_WORDS: gl.constexpr
    TILE_M: gl.constexpr
    TILE_N: gl.constexpr
    FIXED_SPLITS: gl.constexpr


class Segment(NamedTuple):
    """A piece of work; with FIXED_SPLITS it is one split, or what a cut leaves of one."""

    following: gl.tensor  # unit of the tile after it
    place: gl.tensor  # whether it begins its group, or of which partial it is the split
    is_whole: gl.tensor  # whether it is all of its group
    is_left: gl.tensor  # whether another program goes on with its sums
    is_taken: gl.tensor  # whether it goes on with those of another
    row: gl.tensor  # whose queries
    tile_m: gl.tensor  # which query tile of the row
    seq_len: gl.tensor
    context_len: gl.tensor
    tile_begin: gl.tensor  # its key tiles that some query sees
    tile_end: gl.tensor
    tile_edge: gl.tensor  # first key tile that some query does not see in full


class Pairs(NamedTuple):
    """The pairs of token and head of a query tile."""

    token: gl.tensor  # int64
    head: gl.tensor  # int64
    index: gl.tensor  # of the token in its row
    live: gl.tensor


@gluon.jit
def own_share(step):
    """Return the units ``[unit, end)`` of this program, and the row of the first."""
    return share_of_program(step, step.FIXED_SPLITS)


@gluon.jit
def find_segment(step, unit, end, row):
    """Return the segment of a part that starts with `unit`, of `row` or one after it."""
    row = row_of_unit(step, row, unit)
    lanes = lanes_of_group(step)
    if step.FIXED_SPLITS > 0:
        group, splits, split, first_tile, _, split_begin, split_end, after = split_of_unit(
            step, row, unit, step.TILE_N
        )
        tile_m = group * lanes + gl.program_id(0) % lanes
        place = fixed_partial(row, tile_m, splits, split, gl.num_programs(0), step.FIXED_SPLITS)
        place = place.to(gl.int32)
        is_whole = splits == 1
        unit = gl.maximum(unit, split_begin)
        stop = gl.minimum(end, split_end)
        is_left = unit > split_begin
        is_taken = stop < split_end
        origin = split_begin - first_tile  # unit of the group's first key tile, were it one split
        following = after  # past `end` where this is taken
    else:
        group, origin, group_end = group_of_unit(step, row, unit, step.TILE_N)
        tile_m = group * lanes + gl.program_id(0) % lanes
        place = unit == origin
        stop = gl.minimum(end, group_end)
        is_whole = place & (stop == group_end)
        is_left = False
        is_taken = False
        following = unit_after(step, stop, group_end)
    seq_len, context_len, tile_begin, tile_end, tile_edge = seen_tiles(
        step, row, tile_m, step.num_heads, unit - origin, stop - origin, step.MASK, step.TILE_M,
        step.TILE_N,
    )  # fmt: skip
    return Segment(
        following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, context_len,
        tile_begin, tile_end, tile_edge,
    )  # fmt: skip


@gluon.jit
def tile_of_visit(step, segment, visit):
    """Return the key tile that is visited `visit` - `tile_begin` tiles after the first."""
    return visited_tile(visit, segment.tile_begin, segment.tile_end, step.FIXED_SPLITS)


@gluon.jit
def query_pairs(step, segment, layout: gl.constexpr):
    """Unfold a query tile into its pairs."""
    start = gl.load(step.token_starts_ptr + segment.row)
    query_len = gl.load(step.token_starts_ptr + segment.row + 1) - start
    pair = segment.tile_m * step.TILE_M + gl.arange(0, step.TILE_M, layout=layout)
    index = pair // step.num_heads
    token = (start + index).to(gl.int64)
    return Pairs(token, (pair % step.num_heads).to(gl.int64), index, index < query_len)


@gluon.jit
def sees(step, key, seq_len, context_len, index, token, live):
    """Return which queries see which keys (S-4); `key` broadcasts with `index` and `token`."""
    if step.MASK == "causal":
        visible = (key <= context_len + index) & (key < seq_len)
    elif step.MASK == "non_causal":
        visible = (key < seq_len) & (index >= 0)
    else:
        node = key - context_len
        is_draft = (node >= 0) & (key < seq_len)
        at = token * step.TREE_WORDS + (node >> 5)
        context = gl.where(node < 0, -1, 0)  # every query sees it
        word = gl.load(step.tree_words_ptr + at, mask=is_draft & live, other=context)
        visible = ((word >> (node & 31)) & 1) != 0
    return visible


@gluon.jit
def partial_pairs(step, segment, layout: gl.constexpr):
    """Return where the pairs of a segment's partial lie."""
    tile = segment.place
    if step.FIXED_SPLITS == 0:
        tile = partial_of_program(step, segment.place)
    return tile * step.TILE_M + gl.arange(0, step.TILE_M, layout=layout)


@gluon.jit
def kept_pairs(step, segment, layout: gl.constexpr):
    """Return which pairs of a query tile have a place of their own among the partials.

    All of them, but with FIXED_SPLITS none of a lane without queries.
    """
    kept = gl.full([step.TILE_M], True, gl.int1, layout)
    if step.FIXED_SPLITS > 0:
        kept = query_pairs(step, segment, layout).live
    return kept


@gluon.jit
def state_pairs(program, TILE_M: gl.constexpr, layout: gl.constexpr):
    """Return where the pairs of a program's state lie; the same again follows, for what is left."""
    pair = state_of_program(program) * TILE_M + gl.arange(0, TILE_M, layout=layout)
    # Otherwise addresses of states would be found before all loops, and spilled.
    return opaque(pair).to(gl.int64)


@gluon.jit
def taken_pairs(step, role, layout: gl.constexpr):
    """Wait for the state that this role goes on with; return where its pairs lie."""
    source, word_ptr = await_state(step, role, step.FIXED_SPLITS)
    thread_barrier()
    forget_state(word_ptr)
    return state_pairs(source, step.TILE_M, layout)


@gluon.jit
def state_stored(step, role):
    """Let another program go on with what all threads of this role have stored."""
    thread_barrier()
    leave_state(step, role, step.FIXED_SPLITS)
