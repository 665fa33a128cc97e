"""The calls of one runner, and what lies around them."""

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
"""Takes a call's inputs by name, and what makes room for its outputs and its scratch memory."""


def surroundings(device: str | torch.device) -> Surroundings | Bare:
    """Return what lies around the calls of one runner, as ``PAGED_MLA_SURROUNDINGS`` has it."""
    return Surroundings(torch.device(device)) if is_on() else Bare(torch.device(device))


class Surroundings:
    """Guard zones around every tensor, memory full of NaN, and inputs that come late.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._around_cache = guards_of(device)
        self._ready: set[str] = set()

    def cache(self, nbytes: int) -> torch.Tensor:
        """Return memory uint8 [nbytes] for a cache, in the place of the one before.

        That one must not be held any more: there may not be room for two.
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
        """Launch a call, and hold what it wrote against what it may write.

        The first call of a name is made again if its inputs came before it returned. That happens
        when its kernels are compiled first, and then neither the late inputs nor the NaN in shared
        memory reach them.

        Parameters
        ----------
        name : str
            What errors call it.
        launch : callable
        inputs : mapping of str to Tensor
            On the device.
        by_torch : bool
            Whether torch alone is at work, and so no memory is left uninitialised. In its
            deterministic mode it would copy a whole cache to write a few slots.

        Raises
        ------
        Overwritten
            A byte changed beside a tensor or in an input (S-10).
        OutOfMemory
            The device has too little memory for this call.
        """
        guards = guards_of(self._device)
        with out_of_memory_is_no_answer():
            placed = {name: guards.place(name, tensor) for name, tensor in inputs.items()}
            answer, came_early = self._launched(name, launch, placed, inputs, by_torch=by_torch)
            if came_early and name not in self._ready:
                del answer  # its memory is free for the next one
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
        """Return the answer, and whether the inputs came before the call returned."""
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
    """Nothing around the calls, for comparisons of times. See :class:`Surroundings`."""

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
        """Launch a call."""
        with out_of_memory_is_no_answer():
            return launch(inputs, BareRoom(self._device))
