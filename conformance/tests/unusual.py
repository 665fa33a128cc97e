"""Right backends whose arrays have unusual strides, which the protocol allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.meta.mutants.backends import EVERY_FORMAT, MutantBackend
from paged_mla_shared.backend import Runner
from paged_mla_shared.problem import Metadata, Output, Problem

Relaid = Callable[[NDArray[Any]], NDArray[Any]]


def _in_wider(array: NDArray[Any], step: int) -> NDArray[Any]:
    """Return the array as a view with steps of `step` in each axis, backwards if it is < 0."""
    wide = np.zeros([abs(step) * n for n in array.shape], array.dtype)
    view = wide[(slice(None, None, step),) * array.ndim]
    view[...] = array
    return view


_STRIDES: dict[str, Relaid] = {
    "columns": np.asfortranarray,
    "backwards": lambda array: _in_wider(array, -1),
    "gaps": lambda array: _in_wider(array, 2),
}


def _relaid(answer: Any, relay: Relaid) -> Any:
    """Return a result whose arrays have other strides."""
    if isinstance(answer, np.ndarray):
        return relay(answer)
    if isinstance(answer, tuple):
        return tuple(map(relay, answer))
    if isinstance(answer, Output | Metadata):
        return type(answer)(*map(relay, vars(answer).values()))
    return answer


class _Unusual:
    """Changes the strides of all results of a right runner."""

    relay: Relaid

    def __init__(self, _: Problem, inner: Runner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        """Return a call whose results have other strides."""
        call = getattr(self._inner, name)
        return lambda *given: _relaid(call(*given), type(self).relay)


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of a backend by its name."""
    if name not in _STRIDES:
        raise AttributeError(name)
    wrap = type(name, (_Unusual,), {"relay": staticmethod(_STRIDES[name])})
    return lambda: MutantBackend(name=name, wrap=wrap, capabilities=EVERY_FORMAT)
