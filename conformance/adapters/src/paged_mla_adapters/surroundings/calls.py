"""The surroundings of the calls of one runner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TypeVar

import torch

from paged_mla_adapters.surroundings.late_inputs import late_inputs
from paged_mla_adapters.surroundings.margins import guards_of
from paged_mla_adapters.surroundings.memory import out_of_memory_is_no_answer
from paged_mla_adapters.surroundings.room import BareRoom, Room
from paged_mla_adapters.surroundings.shared_memory import fill_shared_memory
from paged_mla_adapters.surroundings.switch import is_on
from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan

T = TypeVar("T")
Launch = Callable[[Mapping[str, torch.Tensor], Room], T]
"""A function of a call's inputs by name, and of the allocator of its outputs and scratch memory."""


def surroundings(device: str | torch.device) -> Surroundings | Bare:
    """Return the surroundings of a runner; ``PAGED_MLA_SURROUNDINGS=off`` returns :class:`Bare`."""
    return Surroundings(torch.device(device)) if is_on() else Bare(torch.device(device))


class Surroundings:
    """Surroundings with guard zones around tensors, memory full of NaN, and late inputs.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._around_cache = guards_of(device)
        self._ready: set[str] = set()

    def cache(self, nbytes: int) -> torch.Tensor:
        """Return memory uint8 [nbytes] for a cache, which replaces the cache before it.

        The caller must release the cache before: the device may not have memory for two caches.

        Raises
        ------
        OutOfMemory
            The device has too little memory for the cache.
        """
        self._around_cache = guards_of(self._device)
        with out_of_memory_is_no_answer():
            return self._around_cache.empty("the cache", (nbytes,), torch.uint8)

    def run(
        self,
        name: str,
        launch: Launch[T],
        inputs: Mapping[str, torch.Tensor],
        *,
        by_torch: bool = False,
    ) -> T:
        """Make a call and check that it wrote only its outputs.

        The first call with a name runs twice if its inputs were complete before it returned. This
        happens when the call compiles its kernels first: late inputs and NaN in shared memory have
        then no effect on the kernels.

        Parameters
        ----------
        name : str
            The name of the call in errors.
        launch : callable
        inputs : mapping of str to Tensor
            Tensors on the device.
        by_torch : bool
            Whether the call runs only operators of torch, which leave no memory uninitialized. The
            call then runs without torch's deterministic mode, which would copy a whole cache to
            write a few slots.

        Returns
        -------
        T
            The result of the call.

        Raises
        ------
        Overwritten
            The call changed a byte outside a tensor or in an input (S-10).
        OutOfMemory
            The device has too little memory for this call.
        """
        guards = guards_of(self._device)
        with out_of_memory_is_no_answer():
            placed = {name: guards.place(name, tensor) for name, tensor in inputs.items()}
            answer, came_early = self._launched(name, launch, placed, inputs, by_torch=by_torch)
            if came_early and name not in self._ready:
                del answer  # frees its memory for the second run
                answer, _ = self._launched(name, launch, placed, inputs, by_torch=by_torch)
            self._ready.add(name)
            guards.check(name)
        return answer

    def _launched(
        self,
        name: str,
        launch: Launch[T],
        placed: Mapping[str, torch.Tensor],
        inputs: Mapping[str, torch.Tensor],
        *,
        by_torch: bool,
    ) -> tuple[T, bool]:
        """Return the call's result, and whether the inputs were complete before it returned."""
        own = guards_of(self._device)
        with late_inputs(placed, inputs, self._device) as have_come:
            fill_shared_memory(self._device)
            with nullcontext() if by_torch else uninitialized_is_nan():
                answer = launch(placed, own)
            came_early = have_come()
        self._around_cache.check(name)
        own.check(name)
        return answer, came_early


class Bare:
    """Plain calls without checks, to compare times. See :class:`Surroundings`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def cache(self, nbytes: int) -> torch.Tensor:
        """Return memory uint8 [nbytes]."""
        with out_of_memory_is_no_answer():
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def run(
        self,
        name: str,  # noqa: ARG002 - as in the surroundings
        launch: Launch[T],
        inputs: Mapping[str, torch.Tensor],
        *,
        by_torch: bool = False,  # noqa: ARG002 - likewise
    ) -> T:
        """Make a call and return its result."""
        with out_of_memory_is_no_answer():
            return launch(inputs, BareRoom(self._device))
