"""Scales of FP8 caches: taken from tokens, and looked up (rule S-11).

SCALES says where they lie, in the words of ``MlaConfig.scales``.
"""

import triton
import triton.language as tl

from paged_mla_shared.formats import GROUPS_PER_BLOCK

GROUPS = tl.constexpr(GROUPS_PER_BLOCK)  # of a block's tokens, with a scale each
_LARGEST = tl.constexpr(448.0)  # of e4m3
_SMALLEST = tl.constexpr(2.0**-126)


@triton.jit
def finite_magnitude(x):
    """Return the magnitude of float32, 0 for infinities and NaN: they take no part in scales."""
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def largest_of(ckv, first, second):
    """Return the largest finite magnitude of tokens: latents and the halves of keys."""
    k_pe = tl.maximum(finite_magnitude(first), finite_magnitude(second))
    return tl.maximum(tl.max(finite_magnitude(ckv), axis=1), tl.max(k_pe, axis=1))


@triton.jit
def scale_of(amax):
    """Return the scale of numbers whose largest finite magnitude is `amax`."""
    return tl.maximum(tl.div_rn(amax, _LARGEST), _SMALLEST)


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
