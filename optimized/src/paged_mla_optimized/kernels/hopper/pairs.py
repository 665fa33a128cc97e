"""The pairs of token and head of a segment: what they see, and where partials and states lie."""

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
    index: gl.tensor  # of the token in its row
    live: gl.tensor


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
def without_unseen(step, segment, scores, key, pairs, KEY_AXIS: gl.constexpr):
    """Return scores, those of keys that a query does not see -inf."""
    PAIR_AXIS: gl.constexpr = 1 - KEY_AXIS
    visible = sees(
        step, key.expand_dims(PAIR_AXIS), segment.seq_len, segment.context_len,
        pairs.index.expand_dims(KEY_AXIS), pairs.token.expand_dims(KEY_AXIS),
        pairs.live.expand_dims(KEY_AXIS),
    )  # fmt: skip
    return gl.where(visible, scores, float("-inf"))


@gluon.jit
def masked(step, segment, scores, tile, KEY_AXIS: gl.constexpr):
    """Return what ``without_unseen`` does of the scores of a key tile, whose pairs it finds."""
    layout: gl.constexpr = scores.type.layout
    key_layout: gl.constexpr = gl.SliceLayout(1 - KEY_AXIS, layout)
    key = tile * step.TILE_N + gl.arange(0, step.TILE_N, layout=key_layout)
    pairs = query_pairs(step, segment, gl.SliceLayout(KEY_AXIS, layout))
    return without_unseen(step, segment, scores, key, pairs, KEY_AXIS)


@gluon.jit
def partial_pairs(step, segment, layout: gl.constexpr):
    """Return where the pairs of a segment's partial lie."""
    tile = partial_of_segment(step, segment, step.FIXED_SPLITS)
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
