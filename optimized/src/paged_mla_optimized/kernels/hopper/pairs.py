"""The pairs of token and head of a segment: their mask, and the places of partials and states."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.optimization_barrier import opaque
from paged_mla_optimized.kernels.common.segments import partial_of_segment
from paged_mla_optimized.kernels.common.split_handoff import (
    await_state,
    forget_state,
    leave_state,
    state_of_program,
)
from paged_mla_optimized.triton_compat.gluon_names import thread_barrier


class Pairs(NamedTuple):
    """The pairs of token and head of a query tile."""

    token: gl.tensor  # int64
    head: gl.tensor  # int64
    index: gl.tensor  # index of the token in its row
    live: gl.tensor  # bool: whether the pair exists


@gluon.jit
def query_pairs(step, segment, layout: gl.constexpr):
    """Return the ``Pairs`` of a query tile, [TILE_M] each."""
    start = gl.load(step.token_starts_ptr + segment.row)
    query_len = gl.load(step.token_starts_ptr + segment.row + 1) - start
    pair = segment.tile_m * step.TILE_M + gl.arange(0, step.TILE_M, layout=layout)
    index = pair // step.num_heads
    token = (start + index).to(gl.int64)
    return Pairs(token, (pair % step.num_heads).to(gl.int64), index, index < query_len)


@gluon.jit
def sees(step, key, seq_len, context_len, index, token, live):
    """Return whether queries see keys (S-4), as bool; `key` broadcasts with `index` and `token`."""
    if step.MASK == "causal":
        visible = (key <= context_len + index) & (key < seq_len)
    elif step.MASK == "non_causal":
        visible = (key < seq_len) & (index >= 0)
    else:
        node = key - context_len
        is_draft = (node >= 0) & (key < seq_len)
        at = token * step.TREE_WORDS + (node >> 5)
        context = gl.where(node < 0, -1, 0)  # every query sees every key of the context
        word = gl.load(step.tree_words_ptr + at, mask=is_draft & live, other=context)
        visible = ((word >> (node & 31)) & 1) != 0
    return visible


@gluon.jit
def without_unseen(step, segment, scores, key, pairs, KEY_AXIS: gl.constexpr):
    """Return the scores, with -inf for keys that a query does not see."""
    PAIR_AXIS: gl.constexpr = 1 - KEY_AXIS
    visible = sees(
        step, key.expand_dims(PAIR_AXIS), segment.seq_len, segment.context_len,
        pairs.index.expand_dims(KEY_AXIS), pairs.token.expand_dims(KEY_AXIS),
        pairs.live.expand_dims(KEY_AXIS),
    )  # fmt: skip
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def masked(step, segment, scores, tile, KEY_AXIS: gl.constexpr):
    """Return the scores of a key tile, with -inf for keys that a query does not see."""
    layout: gl.constexpr = scores.type.layout
    key_layout: gl.constexpr = gl.SliceLayout(1 - KEY_AXIS, layout)
    key = tile * step.TILE_N + gl.arange(0, step.TILE_N, layout=key_layout)
    pairs = query_pairs(step, segment, gl.SliceLayout(KEY_AXIS, layout))
    return without_unseen(step, segment, scores, key, pairs, KEY_AXIS)


@gluon.jit
def partial_pairs(step, segment, layout: gl.constexpr):
    """Return the indices of the pairs of a segment among all partial results, [TILE_M]."""
    tile = partial_of_segment(step, segment, step.FIXED_SPLITS)
    return tile * step.TILE_M + gl.arange(0, step.TILE_M, layout=layout)


@gluon.jit
def kept_pairs(step, segment, layout: gl.constexpr):
    """Return whether each pair of a query tile owns a place among the partial results.

    All pairs do, except with FIXED_SPLITS: there only pairs that exist do, so that a lane without
    queries writes nothing.
    """
    kept = gl.full([step.TILE_M], True, gl.int1, layout)
    if step.FIXED_SPLITS > 0:
        kept = query_pairs(step, segment, layout).live
    return kept


@gluon.jit
def state_pairs(program, TILE_M: gl.constexpr, layout: gl.constexpr):
    """Return the indices of the pairs of a program's state among all partial results, [TILE_M].

    TILE_M more places follow, which store the other parts of the state.
    """
    pair = state_of_program(program) * TILE_M + gl.arange(0, TILE_M, layout=layout)
    # Without ``opaque`` the compiler hoists the addresses of states out of all loops and spills
    # them.
    return opaque(pair).to(gl.int64)


@gluon.jit
def taken_pairs(step, role, layout: gl.constexpr):
    """Wait for the state that this role continues from; return the indices of its pairs."""
    source, word_ptr = await_state(step, role, step.FIXED_SPLITS)
    thread_barrier()
    forget_state(word_ptr)
    return state_pairs(source, step.TILE_M, layout)


@gluon.jit
def state_stored(step, role):
    """Publish the state of this role after all its threads have stored their part of it."""
    thread_barrier()
    leave_state(step, role, step.FIXED_SPLITS)
