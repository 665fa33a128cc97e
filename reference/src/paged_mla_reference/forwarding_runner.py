"""A runner that forwards every call to another runner; subclasses change some calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.backend import OPERATIONS, Runner
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Problem


class ForwardingRunner(Runner):
    """Runner that forwards every operation of the protocol to another runner.

    Parameters
    ----------
    problem : Problem
    inner : Runner
        The runner that receives the calls.
    """

    def __init__(self, problem: Problem, inner: Runner) -> None:
        self.problem, self.inner = problem, inner

    def load_cache(self, image: CacheImage) -> None:
        """Forward the call to the inner runner."""
        self.inner.load_cache(image)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Forward the call to the inner runner."""
        return self.inner.read_cache(block_ids)


def _handed_on(name: str) -> Callable[..., Any]:
    """Return a method that forwards calls of the operation `name` to the inner runner."""

    def hand_on(self: ForwardingRunner, *given: Any) -> Any:
        return getattr(self.inner, name)(*given)

    return hand_on


for _name in OPERATIONS:
    setattr(ForwardingRunner, _name, _handed_on(_name))
