"""Backends that run the kernels of ``paged_mla_optimized`` in the surroundings of the adapters.

``paged_mla_adapters.watched:create`` is the plain backend, and every mode of
``paged_mla_optimized.backend.modes`` has a factory with its name. This module imports a mode when
it is first used, because the packages do not import each other.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from paged_mla_adapters.surroundings.memory import out_of_memory_is_no_answer
from paged_mla_adapters.surroundings.places import GuardedPlaces
from paged_mla_adapters.surroundings.switch import is_on
from paged_mla_adapters.surroundings.uninitialized import uninitialized_is_nan
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.backend import OPERATIONS, Runner
from paged_mla_shared.problem import Problem

_MODES = "paged_mla_optimized.backend.modes"


def __getattr__(name: str) -> Callable[[], WatchedBackend]:
    """Return the factory of a mode, or of the plain backend, by its name."""
    if name.startswith("_"):
        raise AttributeError(name)
    inner: Any = getattr(importlib.import_module(_MODES), name)
    return lambda: WatchedBackend(inner())


class WatchedBackend:
    """A :class:`paged_mla_shared.backend.Backend` that checks the memory around calls of another.

    Parameters
    ----------
    inner : backend
        A dataclass with the field ``places_of``, a function that returns the allocator of a
        runner's tensors.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.name, self.version = f"{inner.name} watched", inner.version
        self.mode, self.device = inner.mode, inner.device
        self.capabilities = inner.capabilities
        self.has_surroundings = True

    @property
    def memory_bytes(self) -> int:
        """The number of free bytes for a cache."""
        return int(self._inner.memory_bytes)

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner whose calls are checked; it raises the errors of the backend."""
        return self._prepared("prepare", problem)

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Return a runner that does not check values of arguments; its calls are checked too."""
        return self._prepared("prepare_unchecked", problem)

    def _prepared(self, method: str, problem: Problem) -> Runner:
        given: list[GuardedPlaces] = []

        def places_of(device: torch.device) -> GuardedPlaces:
            given.append(GuardedPlaces(device))
            return given[-1]

        inner = replace(self._inner, places_of=places_of) if is_on() else self._inner
        with out_of_memory_is_no_answer(), uninitialized_is_nan():
            runner: Runner = getattr(inner, method)(problem)
        return _WatchedRunner(problem, runner, given[-1]) if given else runner


class _WatchedRunner(ForwardingRunner):
    def __init__(self, problem: Problem, inner: Runner, places: GuardedPlaces) -> None:
        super().__init__(problem, inner)
        self.places = places


def _watched(name: str) -> Callable[..., Any]:
    def call(runner: _WatchedRunner, *given: Any) -> Any:
        with runner.places.call(name):
            return getattr(runner.inner, name)(*given)

    return call


for _name in OPERATIONS:
    setattr(_WatchedRunner, _name, _watched(_name))
