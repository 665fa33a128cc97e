"""Convert numbers to e4m3 codes and back (rule S-11).

With NATIVE the functions use the conversion instructions of the device. ``decode`` may be NATIVE
from sm89 on, and ``encode`` from sm90 on. Other architectures and Triton's interpreter use integer
arithmetic on the bits.
"""

import triton
import triton.language as tl

_LARGEST_BITS = tl.constexpr(0x43E00000)  # of 448 as a float32
_NORMAL_BITS = tl.constexpr(0x3C800000)  # of 2 ** -6, the smallest normal magnitude
_INFINITE_BITS = tl.constexpr(0x7F800000)
_STEP = tl.constexpr(16384.0)  # the float32 spacing here is the spacing of subnormal e4m3 numbers
_STEP_BITS = tl.constexpr(0x46800000)


@triton.jit
def encode(x, NATIVE: tl.constexpr):
    """Return the uint8 e4m3 codes of float32 numbers `x`.

    The function rounds to nearest even and saturates at 448. Each NaN becomes 0x7f.
    """
    if NATIVE:
        codes = x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        capped = tl.minimum(magnitude, _LARGEST_BITS)
        normal = ((capped + 0x7FFFF + ((capped >> 20) & 1)) >> 20) - (120 << 3)
        small = tl.minimum(capped, _NORMAL_BITS).to(tl.float32, bitcast=True) + _STEP
        subnormal = small.to(tl.int32, bitcast=True) - _STEP_BITS
        codes = tl.where(capped < _NORMAL_BITS, subnormal, normal) | ((bits >> 24) & 0x80)
        codes = tl.where(magnitude > _INFINITE_BITS, 0x7F, codes).to(tl.uint8)
    return codes


@triton.jit
def decode(codes, DTYPE: tl.constexpr, NATIVE: tl.constexpr):
    """Return the exact values of uint8 e4m3 codes as DTYPE; 0x7f and 0xff are NaN."""
    if NATIVE:
        values = codes.to(tl.float8e4nv, bitcast=True)
    else:  # read as float16, the shifted bits are too small by 2 ** 8, also if subnormal
        bits = codes.to(tl.uint16)
        near = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        values = tl.where((bits & 0x7F) == 0x7F, float("nan"), near * 256.0)
    return values.to(DTYPE)


@triton.jit
def bfloat16_bits(x):
    """Return the int16 bits of x as bfloat16, rounded to nearest even if x has another type.

    The function rounds with integers, because the interpreter's conversion truncates.
    """
    if x.dtype.is_bf16():
        rounded = x.to(tl.int16, bitcast=True)
    else:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > _INFINITE_BITS
        rounded = tl.where(is_nan, 0x7FFF, rounded).to(tl.int16)
    return rounded


@triton.jit
def from_bfloat16_bits(bits, DTYPE: tl.constexpr):
    """Return the numbers whose bfloat16 bits are the int16 `bits`, as DTYPE."""
    if DTYPE.is_bf16():
        values = bits.to(tl.bfloat16, bitcast=True)
    else:
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(DTYPE)
    return values
