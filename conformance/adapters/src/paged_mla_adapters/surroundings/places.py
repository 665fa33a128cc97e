"""An allocator with guard zones, for a runner whose tensors come from its caller."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_adapters.surroundings.margins import guards_of
from paged_mla_adapters.surroundings.memory import out_of_memory_is_no_answer
from paged_mla_adapters.surroundings.shared_memory import fill_shared_memory
from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan


class GuardedPlaces:
    """Allocates the tensors of a runner between guard zones and checks its calls.

    A tensor stays in its place until another tensor with its name is allocated.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._guards = guards_of(device)

    def input(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of an input with its strides; contiguous if an axis has the stride 0."""
        self._guards.forget(name)
        shared = any(
            n > 1 and not step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        return self._guards.place(name, tensor, stride=None if shared else tensor.stride())

    def room(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous, uninitialized tensor that calls may write."""
        self._guards.forget(name)
        return self._guards.empty(name, shape, dtype)

    @contextmanager
    def call(self, name: str) -> Iterator[None]:
        """Run the body of the context as one call, and check that it wrote only its outputs.

        Parameters
        ----------
        name : str
            The name of the call in errors.

        Raises
        ------
        Overwritten
            The call changed a byte outside a tensor or in an input (S-10).
        OutOfMemory
            The device has too little memory for this call.
        """
        with out_of_memory_is_no_answer():
            fill_shared_memory(self._device)
            with uninitialized_is_nan():
                yield
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)  # raises an error of the device here
            self._guards.check(name)
