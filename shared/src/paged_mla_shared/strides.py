"""Strided arrays together with the memory between their elements.

This memory is what a reader finds if it ignores strides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from paged_mla_shared.errors import InvalidArgument

MOST_AXES = 8
SHAPES = "a shape of less than 2^63 bytes, not counting lengths of 0"  # as in NumPy
MOST_GAPS = 64  # largest ratio of an array's memory to its elements


def is_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether an array can have this shape, empty arrays included (``SHAPES``)."""
    return math.prod(max(size, 1) for size in shape) * itemsize < 2**63


def strided(values: NDArray[Any]) -> NDArray[Any]:
    """Return an equal view of a larger array whose gaps contain poison.

    The last axis of floating-point arrays with several axes keeps stride 1, which kernels with
    vector loads need. Arrays of one axis, and of integers, are strided along every axis.
    """
    whole = values.dtype.kind in "iu"
    poison = np.iinfo(values.dtype).max if whole else np.nan  # NaN is true as a bool
    if values.ndim == 1:
        wide = np.full(2 * len(values), poison, values.dtype)
        view = wide[::2]
    elif whole:
        wide = np.full((values.shape[0], 2 * values.shape[1] + 1), poison, values.dtype)
        view = wide[:, : 2 * values.shape[1] : 2]
    else:
        extra = (2 * values.shape[0], *values.shape[1:-1], values.shape[-1] + 32)
        wide = np.full(extra, poison, values.dtype)
        view = wide[: 2 * values.shape[0] : 2, ..., : values.shape[-1]]
    view[...] = values
    return view


def memory_of(array: NDArray[Any]) -> NDArray[Any]:
    """Return the memory from the first element of an array to the last, [n].

    An array whose elements overlap, have negative strides or are very far apart is copied to a
    contiguous array first.
    """
    steps = [stride // array.itemsize for stride in array.strides]
    length = _span(array.shape, steps)
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    if not whole or min(steps, default=0) < 0 or not array.size <= length <= MOST_GAPS * array.size:
        return np.ascontiguousarray(array).reshape(-1)
    return as_strided(array, (length,), (array.itemsize,))


def is_spread(array: NDArray[Any]) -> bool:
    """Return whether an array is not C-contiguous, and :func:`memory_of` does not copy it."""
    return not array.flags.c_contiguous and np.shares_memory(memory_of(array), array)


def laid_out(
    name: str, memory: NDArray[Any], shape: Sequence[int], strides: Sequence[int]
) -> NDArray[Any]:
    """Return a view of memory; strides are in elements.

    Raises
    ------
    InvalidArgument
        Shape and strides do not fit each other, or the view exceeds the memory or has more
        elements than it. The message contains `name`.
    """
    if max(len(shape), len(strides)) > MOST_AXES:
        raise InvalidArgument(name, f"{max(len(shape), len(strides))} axes", f"at most {MOST_AXES}")
    given = f"shape {list(shape)}, strides {list(strides)}"
    if memory.ndim != 1 or len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
        raise InvalidArgument(name, given, "as many lengths as strides, all >= 0, of flat memory")
    if not is_shape(shape, memory.itemsize):
        raise InvalidArgument(name, given, SHAPES)
    if max(math.prod(shape), _span(shape, strides)) > len(memory):
        raise InvalidArgument(name, given, f"a view of its {len(memory)} elements")
    taken = [step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)]
    return as_strided(memory, tuple(shape), [step * memory.itemsize for step in taken])


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy with the same strides and the same memory between the elements."""
    if not is_spread(array):
        return array.copy()
    steps = [stride // array.itemsize for stride in array.strides]
    return laid_out("array", memory_of(array).copy(), array.shape, steps)


def _span(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Return the number of elements of memory from the first element to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
