"""Factors between logarithms of base e and of base 2, and the lse.

The device has instructions for base 2 only.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def lse_of(peak, total):
    """Return ``ln(total * 2 ** peak)`` in float32; NaN stays NaN.

    The function adds the exponent of `total` to `peak` first. The logarithm of the mantissa is
    between 0 and 1, so no rounded intermediate is larger than the sum of the lse and 1.
    ``peak + log2(total)`` would round two numbers that may be far larger than their sum, and their
    rounding errors would remain after they cancel.
    """
    exponent = tl.minimum((total.to(tl.int32, bitcast=True) >> 23) & 0xFF, 253)
    mantissa = total * ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    return (peak + (exponent - 127).to(tl.float32) + tl.log2(mantissa)) * LN_2
