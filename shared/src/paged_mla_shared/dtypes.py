"""Names of element types, and bit views for storage.

Functions of this project take a dtype by its name. bfloat16 and float8 arrays have ml_dtypes types
in NumPy. Outside NumPy they become unsigned integers of the same width (:func:`bits`), because
neither ``.npz`` nor DLPack preserves ml_dtypes types.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
}

SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}

_UNSIGNED: dict[int, DTypeLike] = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a name: "float32", "float16", "bfloat16" or "float8_e4m3"."""
    return NUMPY_DTYPES[name]


def dtype_name(dtype: DTypeLike) -> str:
    """Return the project's name of a NumPy dtype, or NumPy's name if it has no other."""
    known = {v: k for k, v in NUMPY_DTYPES.items()}
    return known.get(np.dtype(dtype), np.dtype(dtype).name)


def bits(array: NDArray[Any]) -> NDArray[Any]:
    """View `array`, of 1, 2 or 4 bytes per element, as unsigned integers of the same width."""
    return array.view(_UNSIGNED[array.dtype.itemsize])


def largest_below(name: str, bound: float) -> float:
    """Return `bound`, or the largest finite number of dtype `name` if that is smaller."""
    info = ml_dtypes.finfo(numpy_dtype(name))  # type: ignore[no-untyped-call]  # ml_dtypes has no types
    return min(bound, float(info.max))
