"""Check that memory that a call writes does not overlap other memory of the call.

The host compares addresses, shapes and strides of tensors, and does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from paged_mla_shared.errors import InvalidArgument

Named = Mapping[str, torch.Tensor | None]  # by argument name

_MOST_WORK: Any = 10_000  # limit of NumPy's search for a common byte; some milliseconds


def check_places(**tensors: torch.Tensor) -> None:
    """Check that each element of a tensor that is written has a separate address.

    Axes are visited from the smallest stride to the largest. Each stride must be at least the span
    of the axes before it. Repeated elements (a stride of 0) and overlapping windows fail, and so do
    interleaved axes, such as shape (2, 3) with strides (3, 2).

    Raises
    ------
    InvalidArgument
        A stride is less than this span; the error names the tensor.
    """
    for name, tensor in tensors.items():
        spanned = 1  # elements
        for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if size == 0:
                break
            if size > 1 and stride < spanned:
                raise InvalidArgument(
                    name, f"strides {tensor.stride()}", "strides that separate all elements"
                )
            spanned += stride * (size - 1)


def check_apart(written: Named, read: Named) -> None:
    """Check that no tensor of `written` shares a byte with another one, or with one of `read`.

    Interleaved slices of one buffer, such as heads or columns, do not share bytes.

    Raises
    ------
    InvalidArgument
        Two tensors share a byte, or the search for one is too long; the error names both.
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
                given = f"memory that overlaps {other_name}"
                raise InvalidArgument(name, given, f"memory that does not overlap {other_name}")


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of the first byte of a tensor and of the byte after its last."""
    start = tensor.data_ptr()
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    if tensor.numel() == 0:
        return start, start
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in axes)
    return start, start + (last + 1) * tensor.itemsize


def _share(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors share a byte; also true if the search would take too long."""
    if tensor.device != other.device:
        return False
    try:
        return np.shares_memory(_addresses(tensor), _addresses(other), max_work=_MOST_WORK)
    except np.exceptions.TooHardError:
        return True


class _Interface:
    """The array interface of a tensor, by which NumPy finds its addresses without reading it."""

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
