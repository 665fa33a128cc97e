"""Rounding to storage types.

No other module of this package rounds a float64 to a narrower type. The names of these functions
therefore mark every rounding point of the specification.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dtypes import numpy_dtype


class Rounding(StrEnum):
    """Whether results are rounded at the rounding points of the specification (S-5)."""

    EXACT = "exact"  # float64 throughout
    SPEC = "spec"  # rounded at every rounding point of the rules


def round_to(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round to the nearest value of a storage type, ties to even.

    Parameters
    ----------
    x : float [...]
        Any values; NaN stays NaN, and infinities keep their sign.
    dtype : {"float32", "float16", "bfloat16"}
        A value that rounds past its largest finite number becomes infinite, as in IEEE 754.

    Returns
    -------
    dtype [...]
        A new array.
    """
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if dtype == "bfloat16":
            x = _odd_float32(np.asarray(x, np.float64))
        return np.array(x, numpy_dtype(dtype))


def widen(x: NDArray[Any]) -> NDArray[np.float64]:
    """Return `x` as float64; this is exact for every storage type."""
    with np.errstate(invalid="ignore"):  # signaling NaN
        return np.asarray(x, np.float64)


def ulp(magnitude: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the distance between neighboring numbers of `dtype` at each magnitude."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]  # ml_dtypes has no types
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return np.asarray(np.exp2(exponent) * float(info.eps), np.float64)


def _odd_float32(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 so that a second rounding, to bfloat16, gives the correctly rounded value.

    Of the two float32 neighbors of an inexact value, this function returns the neighbor with an odd
    last bit. It is never halfway between two bfloat16 values.
    """
    near = np.array(x, np.float32)
    inexact = np.isfinite(x) & (near.astype(np.float64) != x)
    even = (near.view(np.uint32) & 1) == 0
    other = np.nextafter(near, np.where(x > near, np.inf, -np.inf).astype(np.float32))
    return np.where(inexact & even, other, near)
