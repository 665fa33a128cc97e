"""Rule S-11: encoding and decoding of the 8-bit floating point type e4m3.

A code is ``sign | exponent (4 bits) | fraction (3 bits)``. With exponent field e and fraction f its
magnitude is ``(8 + f) * 2^(e - 10)``, or ``f * 2^-9`` if e is 0 (subnormal). The type has no
infinity: the largest magnitude is 448, code 0x7e, and 0x7f and 0xff are NaN.

Encoding rounds to the nearest value, ties to the even code. Values that are too large, infinities
included, become 448 with their sign. Zeros, and values that round to zero, keep their sign. Every
NaN becomes 0x7f, with either sign. The instruction ``cvt.rn.satfinite.e4m3x2.f32`` does the same.

Sources: OCP 8-bit Floating Point Specification (OFP8) 1.0, sections 5.1 to 5.3;
``__nv_cvt_float_to_fp8`` with ``__NV_SATFINITE`` in CUDA's ``cuda_fp8.hpp``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 448.0
_NAN = 0x7F
_SIGN = 0x80
_FRACTION_BITS = 3
_SMALLEST_EXPONENT = -6  # of normal values


def encode(x: NDArray[Any]) -> NDArray[np.uint8]:
    """Return the codes of values.

    Parameters
    ----------
    x : float [...]
        Any type that is not wider than float64.

    Returns
    -------
    uint8 [...]
    """
    number = np.isfinite(x)
    magnitude = np.minimum(np.where(number, np.abs(x), LARGEST).astype(np.float64), LARGEST)
    exponent = np.frexp(np.maximum(magnitude, 2.0**_SMALLEST_EXPONENT))[1] - 1
    steps = np.rint(np.ldexp(magnitude, _FRACTION_BITS - exponent))  # [0, 16], ties to even
    # 16 steps are the first code of the next exponent: rounding up carries into the exponent.
    codes = (exponent - _SMALLEST_EXPONENT) * 2**_FRACTION_BITS + steps.astype(np.int64)
    codes = np.where(np.signbit(x), codes | _SIGN, codes)
    return np.where(np.isnan(x), _NAN, codes).astype(np.uint8)


def _values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, fraction = (codes >> _FRACTION_BITS) & 0xF, codes & 0x7
    steps = np.where(exponent > 0, fraction + 2**_FRACTION_BITS, fraction)
    values: NDArray[np.float32] = np.ldexp(steps.astype(np.float32), np.maximum(exponent, 1) - 10)
    values[_NAN] = np.nan
    values[_SIGN:] = -values[:_SIGN]
    return values


_VALUES = _values()


def decode(codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return the exact value of each code, float32 [...]."""
    values: NDArray[np.float32] = _VALUES[codes]
    return values
