"""A runner whose calls alternate with plans of other steps by a second runner (S-17)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_conformance.runners.decoy import decoy_step
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.backend import OPERATIONS, Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.operation import Operation
from paged_mla_shared.problem import Batch, Output, Problem


class InterleavedRunner(ForwardingRunner):
    """Before every call, another runner plans another step of the same shape.

    The inner runner plans its first step before that.

    Parameters
    ----------
    problem : Problem
    inner : Runner
        The runner that receives the calls.
    other : Runner
        A runner of a problem with the same capacities.
    """

    def __init__(self, problem: Problem, inner: Runner, other: Runner) -> None:
        super().__init__(problem, inner)
        self._other = other
        self._has_planned = False

    def ask(self, operation: Operation, batch: Batch, *others: Any) -> Any:
        """Call an operation on a step after the other runner has planned."""
        self._plan(batch)
        return getattr(self.inner, operation.name)(batch, *others)

    def layer(self, batch: LayerBatch) -> Output:
        """Run a layer after the other runner has planned; a plan does not read the queries."""
        step = batch.step
        absorbed = np.zeros((*step.q_pe.shape[:2], step.ckv.shape[1]), step.q_nope.dtype)
        self._plan(replace(step, q_nope=absorbed))
        return self.inner.layer(batch)

    def _plan(self, batch: Batch) -> None:
        if not self._has_planned:
            self.inner.plan(batch)
        self._has_planned = True
        self._other.plan(decoy_step(self.problem, batch))


def _asked(operation: Operation) -> Callable[..., Any]:
    return lambda runner, *given: runner.ask(operation, *given)


for _operation in OPERATIONS.values():
    if _operation.takes is Batch and _operation.name != "plan":
        setattr(InterleavedRunner, _operation.name, _asked(_operation))
