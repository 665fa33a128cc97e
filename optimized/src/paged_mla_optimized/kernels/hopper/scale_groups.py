"""Scales of cache rows that have one scale for each share, a scale group of latent columns.

A kernel multiplies the weight of a key by one scale, the key scale. It multiplies the values by the
ratio of their share's scale to the key scale. The key scale is a power of two, so that the product
rounds no weight.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# The ratio of a key's largest scale to its key scale is at least 64 and below 128. 448 * 128 is
# below 65504, the largest float16, and a share whose scale is a millionth of the largest keeps all
# bits of float16.
_RATIO = gl.constexpr(64.0)
_TINY = gl.constexpr(2.0**-120)


@gluon.jit
def load_scales(key_scales, first, SHARES: gl.constexpr, key_layout: gl.constexpr):
    """Return a tuple of the SHARES scales of each key, from index `first` on."""
    scales = ()
    for share in gl.static_range(SHARES):
        scales += (key_scales.index(first + share).load(key_layout),)
    return scales


@gluon.jit
def key_scale_of(scales):
    """Return the key scale: 1/64 of a key's largest scale, rounded down to a power of two."""
    largest = gl.abs(scales[0])
    for share in gl.static_range(1, len(scales)):
        largest = gl.maximum(largest, gl.abs(scales[share]))
    bits = gl.maximum(largest, _TINY).to(gl.int32, bitcast=True)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True) * (1 / _RATIO)


@gluon.jit
def store_ratios(scales, key_scale, ratios, first):
    """Store the float16 ratio of each share's scale to the key scale, from index `first` on."""
    reciprocal = 1.0 / key_scale
    for share in gl.static_range(len(scales)):
        ratios.index(first + share).store((scales[share] * reciprocal).to(gl.float16))
