"""Compute the scales of FP8 caches from tokens, and load them (rule S-11).

SCALES specifies where the scales are stored. It has the values of ``MlaConfig.scales``.
"""

import triton
import triton.language as tl

from paged_mla_shared.formats import GROUPS_PER_BLOCK

GROUPS = tl.constexpr(GROUPS_PER_BLOCK)  # scale groups of a block: tokens that share a scale
_LARGEST = tl.constexpr(448.0)  # the largest number of e4m3
_SMALLEST = tl.constexpr(2.0**-126)
_SMALL = tl.constexpr(2.0**-64)
_LARGE = tl.constexpr(2.0**64)
_ZERO = tl.constexpr(1 << 24)  # the order of zero


@triton.constexpr_function
def has_key_scales(scales):
    """Return whether each key, or each scale group of a key, has a scale of its own."""
    return scales not in {"none", "scalar"}


@triton.jit
def order_of(x):
    """Return uint32 numbers that have the order of the finite magnitudes of `x`.

    The results of infinities and NaN are less than _ZERO: doubling the bits of a float32 removes
    the sign, and adding _ZERO makes the bits of infinities and NaN exceed 2 ** 32 and wrap around.
    A maximum of integers needs no check for NaN, and warps have an instruction for it.
    """
    return x.to(tl.float32).to(tl.uint32, bitcast=True) * 2 + _ZERO


@triton.jit
def magnitude_of(order):
    """Return the magnitude whose ``order_of`` is `order`; 0 for infinities and NaN."""
    return ((tl.maximum(order, _ZERO) - _ZERO) >> 1).to(tl.float32, bitcast=True)


@triton.jit
def largest_of(ckv, first, second):
    """Return the largest order of each token's latent, and that of its rotated key."""
    k_pe = tl.maximum(order_of(first), order_of(second))
    return tl.max(order_of(ckv), axis=1), tl.max(k_pe, axis=1)


@triton.jit
def largest_magnitude(ckv, first, second, live):
    """Return the largest finite magnitude in the latents and rotated keys of all live tokens.

    `ckv` [ROWS, R] must be zero for tokens that are not live. `first` and `second` [ROWS, P / 2]
    may be any numbers there.
    """
    k_pe = tl.where(live[:, None], tl.maximum(order_of(first), order_of(second)), 0)
    return magnitude_of(tl.maximum(tl.max(order_of(ckv)), tl.max(k_pe)))


@triton.jit
def scale_of(amax):
    """Return the scale for numbers whose largest finite magnitude is `amax`; at least 2 ** -126."""
    return tl.maximum(tl.div_rn(amax, _LARGEST), _SMALLEST)


@triton.jit
def quotient(x, scale, NATIVE: tl.constexpr, BOUNDED: tl.constexpr):
    """Return x / scale as float32, or a float32 number that has the same e4m3 code.

    With BOUNDED the caller guarantees that the quotient of each finite x is finite in float32. The
    result of an infinite x is then NaN.

    One division for each element would take longer than the memory accesses. So for 16-bit x the
    function multiplies by the reciprocal of the scale, and corrects the result by the remainder.
    Before its last rounding the result is within 2 ** -19 units in the last place of the exact
    quotient. It could round differently from a division only if the quotient is that close to the
    middle of two float32 numbers, and its code could change only if one of the two numbers is the
    boundary between two codes. Such a quotient times the scale has more than 16 bits, so x cannot
    have this value.
    """
    if NATIVE and x.dtype.primitive_bitwidth == 16:
        # The lift, a power of two, keeps the reciprocal and the remainder from underflowing.
        lift = tl.where(scale < _SMALL, _LARGE, tl.where(scale > _LARGE, _SMALL, 1.0))
        x = x.to(tl.float32) * lift
        scale *= lift
        inverse = tl.div_rn(1.0, scale)
        near = x * inverse
        rest = tl.fma(near, scale, -x)  # the negated remainder: below, a zero keeps its sign
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
    """Load the scale of each token: that of the layer, of its group, or its own.

    `block` and `place` are the block of a token and its offset in the block. Tokens that are not
    live get 1, except if the layer has one scale.
    """
    if SCALES == "scalar":
        scale = tl.load(scales_ptr)
    else:
        group = place * GROUPS // block_size if SCALES == "per_group" else place
        scale = tl.load(scales_ptr + block * stride_block + group, mask=live, other=1.0)
    return scale


@triton.jit
def load_row_scale(row_ptr, share, live, R: tl.constexpr):
    """Load the scale of scale group `share` of cache rows; 1 for rows that are not live.

    The scales are stored after the R codes of the latent.
    """
    at = (row_ptr + R).to(tl.pointer_type(tl.float32), bitcast=True) + share
    return tl.load(at, mask=live, other=1.0)
