"""Queries rotated on their way to shared memory (rule S-12), as ``kernels/common/rope.py`` does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.hopper.common import copy_queries, query_pairs


@gluon.jit
def stage_q_pe(
    q_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_token, stride_head, token_starts_ptr, row,
    tile_m, context_len, num_heads, buffer, TILE_M: gl.constexpr, P: gl.constexpr,
    MASK: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Store the rotated part [TILE_M, P] of a query tile, or begin to copy it as it is.

    Copies that were begun before go on while this waits for tables.
    """
    loaded = load_q_pe(
        q_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_token, stride_head, token_starts_ptr, row,
        tile_m, context_len, num_heads, TILE_M, P, 4, MASK, ROPE,
    )  # fmt: skip
    stage_loaded(
        loaded, q_pe_ptr, stride_token, stride_head, token_starts_ptr, row, tile_m, num_heads,
        buffer, TILE_M, P, ROPE,
    )  # fmt: skip


@gluon.jit
def stage_loaded(
    loaded, q_pe_ptr, stride_token, stride_head, token_starts_ptr, row, tile_m, num_heads, buffer,
    TILE_M: gl.constexpr, P: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Do what ``stage_q_pe`` does with what ``load_q_pe`` has loaded."""
    if ROPE == "none":
        copy_queries(
            q_pe_ptr, stride_token, stride_head, token_starts_ptr, row, tile_m, num_heads, buffer,
            TILE_M, 0, P,
        )  # fmt: skip
    else:
        buffer.store(rotated(loaded, ROPE))


@gluon.jit
def load_q_pe(
    q_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_token, stride_head, token_starts_ptr, row,
    tile_m, context_len, num_heads, TILE_M: gl.constexpr, P: gl.constexpr, WARPS: gl.constexpr,
    MASK: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Load what ``rotated`` turns: first and second elements of pairs, cosines and sines.

    Nothing without a rope. Dead pairs are zeros.
    """
    loaded = ()
    if ROPE != "none":
        HALF: gl.constexpr = P // 2
        # Four pairs a thread, and 16 bytes of each table.
        OWN: gl.constexpr = 8 if ROPE == "interleaved" else 4
        layout: gl.constexpr = gl.BlockedLayout([1, OWN], [256 // P, P // 8], [WARPS, 1], [1, 0])
        token, head, index, live = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, TILE_M, gl.SliceLayout(1, layout)
        )
        if MASK == "causal" or MASK == "non_causal":
            position = (context_len + index).to(gl.int64)
        else:  # first: tables wait for it
            position = gl.load(positions_ptr + token, mask=live, other=0)
        at = token * stride_token + head * stride_head
        if ROPE == "interleaved":
            column = gl.arange(0, P, layout=gl.SliceLayout(0, layout))
            rows = gl.load(q_pe_ptr + at[:, None] + column[None, :], mask=live[:, None], other=0.0)
            first, second = rows.reshape([TILE_M, HALF, 2]).split()
        else:
            column = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
            half_ptr = q_pe_ptr + at[:, None] + column[None, :]
            first = gl.load(half_ptr, mask=live[:, None], other=0.0)
            second = gl.load(half_ptr + HALF, mask=live[:, None], other=0.0)

        halves: gl.constexpr = first.type.layout
        position = gl.convert_layout(position, gl.SliceLayout(1, halves), assert_trivial=True)
        live = gl.convert_layout(live, gl.SliceLayout(1, halves), assert_trivial=True)
        pair = gl.arange(0, HALF, layout=gl.SliceLayout(0, halves))
        angle = position[:, None] * HALF + pair[None, :]
        cos = gl.load(cos_ptr + angle, mask=live[:, None], other=0.0)
        sin = gl.load(sin_ptr + angle, mask=live[:, None], other=0.0)
        loaded = (first, second, cos, sin)
    return loaded


@gluon.jit
def rotated(loaded, ROPE: gl.constexpr):
    """Return the rotated part of a query tile, [TILE_M, P].

    Pairs of elements are rotated in the type of the tables, and rounded to that of queries.
    """
    first, second, cos, sin = loaded
    TILE_M: gl.constexpr = first.shape[0]
    P: gl.constexpr = 2 * first.shape[1]
    dtype: gl.constexpr = first.dtype
    first, second = first.to(cos.dtype), second.to(cos.dtype)
    turned = gl.join((first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype))
    if ROPE == "neox":
        turned = turned.permute((0, 2, 1))
    return turned.reshape([TILE_M, P])
