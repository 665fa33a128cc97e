"""Where a call gets memory from beside its inputs."""

from __future__ import annotations

from typing import Protocol

import torch


class Room(Protocol):
    """Gives out tensors; in harsh surroundings they lie between guard zones."""

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor that a call may write, with whatever lies in it.

        Parameters
        ----------
        name : str
            What an error calls it.
        shape : tuple of int
        dtype : torch.dtype
        """

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a dense copy of a tensor, which a call may only read."""


class BareRoom:
    """Gives out tensors with nothing around them. See :class:`Room`.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:  # noqa: ARG002 - as in a room
        """Return a dense tensor."""
        return torch.empty(shape, dtype=dtype, device=self._device)

    def place(self, name: str, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - likewise
        """Return a dense copy of a tensor."""
        return tensor.contiguous().clone()
