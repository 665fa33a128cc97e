"""Guarded places for the tensors of a runner that takes them from its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_adapters.surroundings.margins import guards_of
from paged_mla_adapters.surroundings.memory import out_of_memory_is_no_answer
from paged_mla_adapters.surroundings.shared_memory import fill_shared_memory
from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan


class GuardedPlaces:
    """Gives a runner its tensors between guard zones, and watches over its calls.

    A tensor lies there until another one of its name is asked for.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guards = guards_of(device)

    def input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of an input, with its strides unless elements share memory."""
        self._guards.forget(name)
        shared = any(
            n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return self._guards.place(name, tensor, stride=None if shared else tensor.stride())

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a dense tensor that calls may write."""
        self._guards.forget(name)
        return self._guards.empty(name, shape, dtype)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Surround one call, and hold what it wrote against what it may write.

        Raises
        ------
        Overwritten
            A byte changed beside a tensor or in an input (S-10).
        OutOfMemory
            The device has too little memory for this call.
        """
        with out_of_memory_is_no_answer():
            fill_shared_memory(self._device)
            with uninitialized_is_nan():
                yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # a fault is raised here, of this call
            self._guards.check(name)
