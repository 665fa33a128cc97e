"""Rounding to storage types, in one place.

Nothing else in this package turns a float64 into a narrower type, so that every rounding
point of the specification can be found by the name of these helpers.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dtypes import numpy_dtype


class Rounding(StrEnum):
    """Whether an answer is rounded where the specification rounds (S-5)."""

    EXACT = "exact"  # float64 throughout
    SPEC = "spec"  # rounded at every rounding point of the rules


def round_to(x: NDArray[Any], dtype: str) -> NDArray[Any]:
    """Round to the nearest value of a storage type, ties to even.

    Parameters
    ----------
    x : float [...]
        Any values; NaN and infinities stay what they are.
    dtype : {"float32", "float16", "bfloat16"}
        Values beyond its largest finite one become infinite, as IEEE 754 says.

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
    """Return `x` as float64; exact for every storage type."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(x, np.float64)


def ulp(magnitude: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the spacing of `dtype` at each magnitude."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]  # ml_dtypes has no types
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return np.asarray(np.exp2(exponent) * float(info.eps), np.float64)


def _odd_float32(x: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round to float32 so that a second rounding, to bfloat16, is as good as one.

    Of the two float32 neighbours of an inexact value this picks the one with an odd last bit,
    which is never halfway between two bfloat16 values.
    """
    near = np.array(x, np.float32)
    inexact = np.isfinite(x) & (near.astype(np.float64) != x)
    even = (near.view(np.uint32) & 1) == 0
    other = np.nextafter(near, np.where(x > near, np.inf, -np.inf).astype(np.float32))
    return np.where(inexact & even, other, near)
