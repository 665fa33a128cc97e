"""Rotate queries on their way to shared memory (rule S-12).

The results have the same bits as those of ``kernels/common/rope.py``.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.token_head import line_at
from paged_mla_optimized.kernels.hopper.async_rows import copy_queries
from paged_mla_optimized.kernels.hopper.pairs import query_pairs


class RopeTables(NamedTuple):
    """The positions and tables that rotate queries; each is None without a rope."""

    positions_ptr: gl.tensor  # int64 [T]
    cos_ptr: gl.tensor  # [max_model_len, P / 2]
    sin_ptr: gl.tensor  # [max_model_len, P / 2]


class Rope(NamedTuple):
    """``RopeTables``, and the order of the pairs of elements."""

    positions_ptr: gl.tensor
    cos_ptr: gl.tensor
    sin_ptr: gl.tensor
    ROPE: gl.constexpr  # "none", "interleaved" or "neox"


@gluon.jit
def stage_q_pe(step, segment, q_pe, rope, buffer):
    """Store the rotated part [TILE_M, P] of a query tile; without a rope, start to copy it.

    Copies that were started before continue while this function waits for the tables.
    """
    if rope.ROPE == "none":
        copy_queries(step, segment, q_pe, buffer, 0, buffer.shape[1])
    else:
        buffer.store(rotated(load_q_pe(step, segment, q_pe, rope, buffer.shape[1], 4), rope))


@gluon.jit
def load_q_pe(step, segment, q_pe, rope, P: gl.constexpr, WARPS: gl.constexpr):
    """Return the arguments of ``rotated``: both elements of each pair, cosines and sines.

    The result is empty without a rope. Elements of pairs (of token and head) that are not live are
    zeros.
    """
    loaded = ()
    if rope.ROPE != "none":
        HALF: gl.constexpr = P // 2
        # Each thread loads four pairs of elements, and 16 bytes of each table.
        OWN: gl.constexpr = 8 if rope.ROPE == "interleaved" else 4
        layout: gl.constexpr = gl.BlockedLayout([1, OWN], [256 // P, P // 8], [WARPS, 1], [1, 0])
        pairs = query_pairs(step, segment, gl.SliceLayout(1, layout))
        live = pairs.live
        if step.MASK == "causal":
            position = (segment.context_len + pairs.index).to(gl.int64)
        elif step.MASK == "non_causal":  # rows may have fewer keys than queries
            position = gl.maximum(segment.context_len + pairs.index, 0).to(gl.int64)
        else:  # this load comes first, because the loads of the tables depend on it
            position = gl.load(rope.positions_ptr + pairs.token, mask=live, other=0)
        at = line_at(q_pe, pairs.token, pairs.head)
        if rope.ROPE == "interleaved":
            column = gl.arange(0, P, layout=gl.SliceLayout(0, layout))
            rows = gl.load(q_pe.ptr + at[:, None] + column[None, :], mask=live[:, None], other=0.0)
            first, second = rows.reshape([step.TILE_M, HALF, 2]).split()
        else:
            column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
            half_ptr = q_pe.ptr + at[:, None] + column[None, :]
            first = gl.load(half_ptr, mask=live[:, None], other=0.0)
            second = gl.load(half_ptr + HALF, mask=live[:, None], other=0.0)

        halves: gl.constexpr = first.type.layout
        position = gl.convert_layout(position, gl.SliceLayout(1, halves), assert_trivial=True)
        live = gl.convert_layout(live, gl.SliceLayout(1, halves), assert_trivial=True)
        pair = gl.arange(0, HALF, layout=gl.SliceLayout(0, halves))
        angle = position[:, None] * HALF + pair[None, :]
        cos = gl.load(rope.cos_ptr + angle, mask=live[:, None], other=0.0)
        sin = gl.load(rope.sin_ptr + angle, mask=live[:, None], other=0.0)
        loaded = (first, second, cos, sin)
    return loaded


@gluon.jit
def rotated(loaded, rope):
    """Return the rotated part of a query tile, [TILE_M, P].

    The function rotates in the type of the tables, and rounds the result to the type of queries.
    """
    first, second, cos, sin = loaded
    TILE_M: gl.constexpr = first.shape[0]
    P: gl.constexpr = 2 * first.shape[1]
    dtype: gl.constexpr = first.dtype
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    turned = gl.join((first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype))
    if rope.ROPE == "neox":
        turned = turned.permute((0, 2, 1))
    return turned.reshape([TILE_M, P])
