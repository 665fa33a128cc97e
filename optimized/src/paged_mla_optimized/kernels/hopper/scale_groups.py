"""Scales of rows that have one for each share of their latent.

Weights are multiplied by one scale of each key, values by the ratio of their share's to that. The
first is a power of two, so that it rounds no weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The least ratio of a key's largest scale to what counts as its scale; the greatest is below twice
# as much. 448 times that is below 65504, and shares of a millionth of the largest keep all bits of
# float16.
_RATIO = gl.constexpr(64.0)
_TINY = gl.constexpr(2.0**-120)


@gluon.jit
def load_scales(key_scales, first, SHARES: gl.constexpr, key_layout: gl.constexpr):
    """Load the scales of each key, those that lie from `first` on."""
    scales = ()
    for share in gl.static_range(SHARES):
        scales += (key_scales.index(first + share).load(key_layout),)
    return scales


@gluon.jit
def key_scale_of(scales):
    """Return what counts as the scale of each key that has several."""
    largest = gl.abs(scales[0])
    for share in gl.static_range(1, len(scales)):
        largest = gl.maximum(largest, gl.abs(scales[share]))
    bits = gl.maximum(largest, _TINY).to(gl.int32, bitcast=True)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True) * (1 / _RATIO)


@gluon.jit
def store_ratios(scales, key_scale, ratios, first):
    """Store the float16 ratios of each share's `scales` to `key_scale`, from `first` on."""
    reciprocal = 1.0 / key_scale
    for share in gl.static_range(len(scales)):
        ratios.index(first + share).store((scales[share] * reciprocal).to(gl.float16))
