"""Logarithms: factors between base e and base 2, which a device has, and the lse."""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def lse_of(peak, total):
    """Return ``ln(total * 2 ** peak)`` in float32; NaN stays NaN.

    The exponent of `total` is added to `peak` first, and the logarithm of its mantissa lies between
    0 and 1: no number that is rounded is larger than the lse and 1 together. ``peak + log2(total)``
    would round two numbers that may be far larger, and the error would remain where they cancel.
    """
    exponent = tl.minimum((total.to(tl.int32, bitcast=True) >> 23) & 0xFF, 253)
    mantissa = total * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (peak + (exponent - 127).to(tl.float32) + tl.log2(mantissa)) * LN_2
