"""Arrays with what lies between their elements: what a reader finds that takes them for dense."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from paged_mla_shared.errors import InvalidArgument

MOST_AXES = 8
SHAPES = "lengths of less than 2^63 bytes, but for those of 0"  # as NumPy has them
MOST_GAPS = 64  # times the elements that an array may be spread over


def is_shape(shape: Sequence[int], itemsize: int) -> bool:
    """Return whether the lengths are those of an array, be it an empty one (``SHAPES``)."""
    return math.prod(max(size, 1) for size in shape) * itemsize < 2**63


def strided(values: NDArray[Any]) -> NDArray[Any]:
    """Return an equal view inside a larger array whose gaps hold poison.

    The last axis of numbers keeps stride 1, as kernels that load vectors need; what is read one by
    one (lengths, a block table, slots, a mask) is strided along every axis.
    """
    whole = values.dtype.kind in "iu"
    poison = np.iinfo(values.dtype).max if whole else np.nan  # which is true, as a bool
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
    """Return the memory from the first element to the last, [n].

    An array whose elements overlap, run backwards or lie very far apart is made dense first.
    """
    steps = [stride // array.itemsize for stride in array.strides]
    length = _span(array.shape, steps)
    whole = all(stride % array.itemsize == 0 for stride in array.strides)
    if not whole or min(steps, default=0) < 0 or not array.size <= length <= MOST_GAPS * array.size:
        return np.ascontiguousarray(array).reshape(-1)
    return as_strided(array, (length,), (array.itemsize,))


def is_spread(array: NDArray[Any]) -> bool:
    """Return whether :func:`memory_of` has more, or in another order, than a dense array's."""
    return not array.flags.c_contiguous and np.shares_memory(memory_of(array), array)


def laid_out(
    name: str, memory: NDArray[Any], shape: Sequence[int], strides: Sequence[int]
) -> NDArray[Any]:
    """Return a view of memory; strides are in elements.

    Raises
    ------
    InvalidArgument
        It reaches out of the memory, or has more elements than it; the message calls it `name`.
    """
    if max(len(shape), len(strides)) > MOST_AXES:
        raise InvalidArgument(name, f"{max(len(shape), len(strides))} axes", f"at most {MOST_AXES}")
    given = f"shape {list(shape)}, strides {list(strides)}"
    if memory.ndim != 1 or len(shape) != len(strides) or min((*shape, *strides), default=0) < 0:
        raise InvalidArgument(name, given, "as many of both, none below 0, of a tensor of one axis")
    if not is_shape(shape, memory.itemsize):
        raise InvalidArgument(name, given, SHAPES)
    if max(math.prod(shape), _span(shape, strides)) > len(memory):
        raise InvalidArgument(name, given, f"a view of its {len(memory)} elements")
    taken = [step if size > 1 else 0 for size, step in zip(shape, strides, strict=True)]
    return as_strided(memory, tuple(shape), [step * memory.itemsize for step in taken])


def copied(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy that is as spread as the array, over the same numbers."""
    if not is_spread(array):
        return array.copy()
    steps = [stride // array.itemsize for stride in array.strides]
    return laid_out("array", memory_of(array).copy(), array.shape, steps)


def _span(shape: Sequence[int], steps: Sequence[int]) -> int:
    """Return how many elements there are from the first to the last."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
