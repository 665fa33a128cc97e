"""Store query tiles as float16 in shared memory, for 16-bit products with e4m3 keys.

Keys become float16, which represents e4m3 exactly. Queries become float16 too. bfloat16 has fewer
bits than float16 but a wider range, so each pair is first multiplied by a power of two, and its
scores are divided by it again. A component of at least 2 ** -32 of the pair's largest component
loses no bit, and a component below 2 ** -39 of it becomes 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from paged_mla_optimized.kernels.common.token_head import line_at
from paged_mla_optimized.kernels.hopper.pairs import query_pairs
from paged_mla_optimized.kernels.hopper.rope import load_q_pe, rotated

_SMALLEST = gl.constexpr(2.0**-126)  # not 0: the product with a masked score of -inf would be NaN


@gluon.jit
def _load_columns(step, segment, q, WIDTH: gl.constexpr, WARPS: gl.constexpr):
    """Load the first WIDTH columns of a query tile; pairs that are not live are zeros."""
    ALONG: gl.constexpr = min(WIDTH // 8, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ALONG, ALONG], [WARPS, 1], [1, 0])
    pairs = query_pairs(step, segment, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    ptrs = q.ptr + line_at(q, pairs.token, pairs.head)[:, None] + column[None, :]
    return gl.load(ptrs, mask=pairs.live[:, None], other=0.0)


@gluon.jit
def load_query_tile(
    step, segment, q_nope, q_pe, rope, R: gl.constexpr, P: gl.constexpr, WARPS: gl.constexpr
):
    """Return a query tile: the latent part [TILE_M, R] and the rotated part [TILE_M, P]."""
    nope = _load_columns(step, segment, q_nope, R, WARPS)
    if rope.ROPE == "none":
        pe = _load_columns(step, segment, q_pe, P, WARPS)
    else:
        pe = rotated(load_q_pe(step, segment, q_pe, rope, P, WARPS), rope)
    return nope, pe


@gluon.jit
def _highest(q):
    """Return the largest magnitude of each pair's components, as float32."""
    return gl.max(gl.abs(q.to(gl.float32)), 1)


@gluon.jit
def power_of(nope, pe):
    """Return the exponent, biased by 127, of the power of two that multiplies each pair."""
    top = _highest(nope)
    top = gl.maximum(top, gl.convert_layout(_highest(pe), top.type.layout))
    # The power is at most 2 ** 64. It brings the largest component into [2 ** 14, 2 ** 15).
    return gl.minimum(127 + 14 + 127 - (top.to(gl.int32, bitcast=True) >> 23), 127 + 64)


@gluon.jit
def lowered(scale, power):
    """Return the `scale` of scores divided by the power of two of their queries."""
    return gl.maximum(((254 - power) << 23).to(gl.float32, bitcast=True) * scale, _SMALLEST)


@gluon.jit
def store_halves(q, power, buffer, FIRST: gl.constexpr):
    """Store queries as float16 in two halves of columns, from pair FIRST on.

    The halves have the column order of ``contracted``.
    """
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    factor = (power << 23).to(gl.float32, bitcast=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, q.type.layout))
    q = (q.to(gl.float32) * factor[:, None]).to(gl.float16)
    left, right = q.reshape([ROWS, WIDTH // 4, 2, 2]).permute((0, 1, 3, 2)).split()
    buffer.index(0).slice(FIRST, ROWS).store(left.reshape([ROWS, WIDTH // 2]))
    buffer.index(1).slice(FIRST, ROWS).store(right.reshape([ROWS, WIDTH // 2]))


@gluon.jit
def store_pieces(q, power, buffer):
    """Store queries as bfloat16 pieces, whose sum is the query.

    float16 queries need two pieces: the second one is the rounding error of the first.
    """
    PIECES: gl.constexpr = buffer.shape[0]
    factor = (power << 23).to(gl.float32, bitcast=True)
    factor = gl.convert_layout(factor, gl.SliceLayout(1, q.type.layout))
    rest = q.to(gl.float32) * factor[:, None]
    for piece in gl.static_range(PIECES):
        rounded = rest.to(gl.bfloat16)
        buffer.index(piece).store(rounded)
        rest -= rounded.to(gl.float32)
