"""Where a runner's tensors lie: a harness that watches memory has places of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class Places(Protocol):
    """Gives a runner the tensors that its kernels get."""

    def input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return an input where kernels shall read it, with its strides unless they overlap."""
        ...

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor that kernels may write, whatever it holds."""
        ...


PlacesOf = Callable[[torch.device], Places]
"""Returns the places of one runner on a device."""


class OwnAllocations:
    """Every tensor is where torch allocates it. See :class:`Places`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def input(self, _name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself."""
        return tensor

    def room(self, _name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)
