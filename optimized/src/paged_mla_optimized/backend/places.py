"""The allocation of a runner's tensors, which a harness that watches memory can replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Places(Protocol):
    """Allocates the tensors of a runner's kernels."""

    def input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor that kernels may read: `tensor`, or a copy with its strides.

        A copy is contiguous if an axis of `tensor` has the stride 0.
        """
        ...

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor with undefined contents that kernels may write."""
        ...


PlacesOf = Callable[[torch.device], Places]
"""Returns the :class:`Places` of one runner on a device."""


class OwnAllocations:
    """Allocates tensors with torch and does not copy inputs. See :class:`Places`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def input(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def room(self, _name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)
