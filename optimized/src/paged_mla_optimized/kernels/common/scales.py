"""Scales of FP8 caches: taken from tokens, and looked up (rule S-11).

SCALES says where they lie, in the words of ``MlaConfig.scales``.
"""

import triton
import triton.language as tl

from paged_mla_shared.formats import GROUPS_PER_BLOCK

GROUPS = tl.constexpr(GROUPS_PER_BLOCK)  # of a block's tokens, with a scale each
_LARGEST = tl.constexpr(448.0)  # of e4m3
_SMALLEST = tl.constexpr(2.0**-126)
_SMALL = tl.constexpr(2.0**-64)
_LARGE = tl.constexpr(2.0**64)
_ZERO = tl.constexpr(1 << 24)  # the order of zero


@triton.constexpr_function
def has_key_scales(scales):
    """Return whether keys, or shares of them, have scales of their own."""
    return scales not in {"none", "scalar"}


@triton.jit
def order_of(x):
    """Return uint32 in the order of finite magnitudes; infinities and NaN are less than _ZERO.

    Doubled, the bits of a float32 lose their sign. With _ZERO added, those of infinities and NaN
    pass 2 ** 32. Integers have no NaN to look for, and warps have an instruction for their maximum.
    """
    return x.to(tl.float32).to(tl.uint32, bitcast=True) * 2 + _ZERO


@triton.jit
def magnitude_of(order):
    """Return the magnitude that has this order, 0 for infinities and NaN."""
    return ((tl.maximum(order, _ZERO) - _ZERO) >> 1).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(ckv, first, second):
    """Return the largest orders of tokens: of latents, and of the halves of keys."""
    k_pe = tl.maximum(order_of(first), order_of(second))
    return tl.max(order_of(ckv), axis=1), tl.max(k_pe, axis=1)


@triton.jit
def largest_magnitude(ckv, first, second, live):
    """Return the largest finite magnitude of all tokens that are live, latents [ROWS, R] or keys.

    Latents of others are zeros.
    """
    k_pe = tl.where(live[:, None], tl.maximum(order_of(first), order_of(second)), 0)
    return magnitude_of(tl.maximum(tl.max(order_of(ckv)), tl.max(k_pe)))


@triton.jit
def scale_of(amax):
    """Return the scale of numbers whose largest finite magnitude is `amax`."""
    return tl.maximum(tl.div_rn(amax, _LARGEST), _SMALLEST)


@triton.jit
def quotient(x, scale, NATIVE: tl.constexpr, BOUNDED: tl.constexpr):
    """Return x / scale as float32, or a number that has the same e4m3 code.

    With BOUNDED no finite x is so many scales that a float32 cannot tell, and for infinite x it is
    NaN: that is what is left over of them.

    Divisions of every element take longer than memory does, so 16-bit x are multiplied by the
    scale's reciprocal, and so is what that leaves over. Before it is rounded, the result is within
    2 ** -19 units in its last place of the exact quotient. Only a quotient that close to the middle
    of two float32 numbers could be rounded apart from the division, and change its code if one of
    the two lies between codes. Multiplied by the scale, such a number has more than 16 bits.
    """
    if NATIVE and x.dtype.primitive_bitwidth == 16:
        # So that neither the reciprocal nor what is left over underflows.
        lift = tl.where(scale < _SMALL, _LARGE, tl.where(scale > _LARGE, _SMALL, 1.0))
        x = x.to(tl.float32) * lift
        scale *= lift
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        rest = tl.fma(near, scale, -x)  # this way round, a zero keeps its sign below
        result = tl.fma(rest, -inverse, near)
        if not BOUNDED:
            result = tl.where(tl.abs(near) < float("inf"), result, near)
    else:  # the interpreter's fma rounds twice
        x = x.to(tl.float32)
        result = tl.div_rn(x, scale)
        if BOUNDED:
            result = tl.where(tl.abs(x) < float("inf"), result, float("nan"))
    return result


@triton.jit
def load_scales(
    scales_ptr, block, place, stride_block, block_size, live, SCALES: tl.constexpr,
):  # fmt: skip
    """Load the scale of tokens at a place in a block, or that of the layer; 1 for dead ones."""
    if SCALES == "scalar":
        scale = tl.load(scales_ptr)
    else:
        group = place * GROUPS // block_size if SCALES == "per_group" else place
        scale = tl.load(scales_ptr + block * stride_block + group, mask=live, other=1.0)
    return scale


@triton.jit
def load_row_scale(row_ptr, share, live, R: tl.constexpr):
    """Load the scale of a share, which lies behind the latents of rows [..]; 1 for dead ones."""
    at = (row_ptr + R).to(tl.pointer_type(tl.float32), bitcast=True) + share
    return tl.load(at, mask=live, other=1.0)
