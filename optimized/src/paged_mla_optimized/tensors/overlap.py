"""Memory that a call writes holds nothing else of the call: tensors are apart, element by element.

Addresses, shapes and strides are compared on the host; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paged_mla_shared.errors import InvalidArgument

Named = Mapping[str, torch.Tensor | None]  # as the caller of the API names them

_MOST_WORK: Any = 10_000  # of NumPy's search for a common byte, some milliseconds


def check_places(**tensors: torch.Tensor) -> None:
    """Check that each element of what is written has a place of its own.

    Axes, from the smallest stride to the largest, must step past what the axes before them span:
    repeated elements (a stride of 0) and overlapping windows do not.

    Raises
    ------
    InvalidArgument
        Names the tensor.
    """
    for name, tensor in tensors.items():
        spanned = 1  # elements
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size == 0:
                break
            if size > 1 and stride < spanned:
                raise InvalidArgument(
                    name, f"strides {tensor.stride()}", "a place of its own for each element"
                )
            spanned += stride * (size - 1)


def check_apart(written: Named, read: Named) -> None:
    """Check that no tensor of `written` shares a byte with another one, or with one of `read`.

    Slices that lie among each other in one buffer, such as heads or columns, are apart.

    Raises
    ------
    InvalidArgument
        Names both tensors.
    """
    spans = [
        (name, tensor, *_span(tensor))
        for name, tensor in (*written.items(), *read.items())
        if tensor is not None
    ]
    num_written = sum(tensor is not None for tensor in written.values())
    for number, (name, tensor, start, end) in enumerate(spans[:num_written]):
        for other_name, other, other_start, other_end in spans[number + 1 :]:
            if start < other_end and other_start < end and _share(tensor, other):
                given = f"memory that {other_name} lies in, too"
                raise InvalidArgument(name, given, f"memory apart from {other_name}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in axes)
    return start, start + (last + 1) * tensor.itemsize


def _share(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether some byte belongs to both; true also where the search would take long."""
    if tensor.device != other.device:
        return False
    try:
        return np.shares_memory(_addresses(tensor), _addresses(other), max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """What NumPy asks for where an array lies; it reads none of that memory here."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.itemsize
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), True),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"|V{size}",
        }


def _addresses(tensor: torch.Tensor) -> np.ndarray:
    return np.asarray(_Interface(tensor))
