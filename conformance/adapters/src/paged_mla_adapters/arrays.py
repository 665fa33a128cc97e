"""Conversions between NumPy arrays and torch tensors; they keep the bits, also of bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_shared.dtypes import bits, dtype_name, numpy_dtype

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def to_torch(array: NDArray[Any], device: str) -> torch.Tensor:
    """Return a new contiguous tensor on a device with the bits of `array`."""
    dense = np.array(array, order="C", copy=True)
    if dtype_name(dense.dtype) == "bfloat16":
        return torch.from_numpy(bits(dense)).view(torch.bfloat16).to(device)
    return torch.from_numpy(dense).to(device)


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a new array with the bits of `tensor`."""
    dense = tensor.detach().cpu().contiguous()
    if dense.dtype is torch.bfloat16:
        return dense.view(torch.uint16).numpy().copy().view(numpy_dtype("bfloat16"))
    return dense.numpy().copy()
