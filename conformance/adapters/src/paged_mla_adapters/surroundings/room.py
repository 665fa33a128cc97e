"""Allocators of the memory that a call needs in addition to its inputs."""

from __future__ import annotations

from typing import Protocol

import torch


class Room(Protocol):
    """An allocator of tensors, which are between guard zones unless surroundings are off."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous, uninitialized tensor that a call may write.

        Parameters
        ----------
        name : str
            The name of the tensor in errors.
        shape : tuple of int
        dtype : torch.dtype
        """

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous copy of a tensor, which a call may only read."""


class BareRoom:
    """An allocator of tensors without guard zones. See :class:`Room`.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002 - as in a room
        """Return a contiguous, uninitialized tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - likewise
        """Return a contiguous copy of a tensor."""
        return tensor.contiguous().clone()
