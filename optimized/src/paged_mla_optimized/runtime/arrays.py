"""Conversions between NumPy arrays and torch tensors that preserve every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_shared.dtypes import NUMPY_DTYPES, bits
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.strides import MOST_GAPS, laid_out

_TORCH_DTYPES = {np.dtype(NUMPY_DTYPES[name]): dtype for dtype, name in DTYPE_NAMES.items()}
_TORCH_DTYPES |= {
    np.dtype(np.bool_): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
}


def to_torch(name: str, array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `array` to `device` with its strides, and with the memory between its elements.

    An array with a negative stride, or that is not a view of a dense array of its dtype, becomes a
    dense tensor.

    Raises
    ------
    InvalidArgument
        torch has no matching dtype; the error uses `name` for the array.
    """
    if array.dtype not in _TORCH_DTYPES:
        raise InvalidArgument(
            name, array.dtype, "bool, uint8, int32, int64, float16, bfloat16, float32 or float64"
        )
    dtype = _TORCH_DTYPES[array.dtype]
    whole = _owner(array)
    steps = [stride // array.itemsize for stride in array.strides]
    if whole is None or min(steps, default=0) < 0 or whole.dtype != array.dtype:
        return _dense(array, dtype).to(device)
    offset = (_address(array) - _address(whole)) // array.itemsize
    return _dense(whole.ravel(), dtype).to(device).as_strided(array.shape, steps, offset)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a new array with the bits of `tensor`."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().copy().view(NUMPY_DTYPES["bfloat16"])
    if tensor.dtype is torch.float8_e4m3fn:
        return tensor.view(torch.uint8).numpy().copy().view(NUMPY_DTYPES["float8_e4m3"])
    return tensor.numpy().copy()


def to_numpy_spread(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a new array with the bits of `tensor`, its strides, and the memory in between.

    A tensor whose elements overlap or are very far apart becomes a dense array.
    """
    length = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_contiguous() or not tensor.numel() <= length <= MOST_GAPS * tensor.numel():
        return to_numpy(tensor)
    memory = to_numpy(tensor.as_strided((length,), (1,)))
    return laid_out("tensor", memory, tensor.shape, tensor.stride())


def _dense(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    copy = np.array(array, order="C", copy=True)
    if dtype is torch.bfloat16:
        return torch.from_numpy(bits(copy)).view(dtype)
    return torch.from_numpy(copy)


def _owner(array: NDArray[Any]) -> NDArray[Any] | None:
    """Return the dense array that owns the memory of the view `array`, or None if there is none."""
    owner = array
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    return owner if owner is not array and owner.flags.c_contiguous else None


def _address(array: NDArray[Any]) -> int:
    return int(array.__array_interface__["data"][0])
