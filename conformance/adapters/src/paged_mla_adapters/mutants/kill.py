"""A step of the suite on a careless kernel, which checks that the kernel's guard finds it."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from typing import cast
from unittest import mock

import torch

from paged_mla_adapters.kernel import KernelBackend
from paged_mla_adapters.mutants.careless import Careless
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.tolerance.compare import Mismatch, check_merge
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import CASES, MERGES
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Problem

_CASE = {"attend": "decode-h8", "append": "append-explicit-slots", "merge": "decode-h8"}


def fault_in(mutant: Careless) -> str:
    """Return the reason why a mutant's guard does not kill it; "" if the guard kills it.

    A guard kills a mutant if the step fails with a message of the guard in all surroundings, and
    passes if only this guard is off.
    """
    said = _said(mutant, nullcontext())
    if not said:
        return "survives"
    if not re.match(mutant.guard.says, said):
        return f"fails, but not by {mutant.guard.name}: {said}"
    said = _said(mutant, mutant.guard.removed())
    return f"fails also without {mutant.guard.name}: {said}" if said else ""


def _said(mutant: Careless, surroundings: AbstractContextManager[None]) -> str:
    with surroundings:
        try:
            ask(mutant.backend, mutant.operation)
        except Mismatch as error:
            return str(error)
    return ""


def ask(backend: KernelBackend, operation: str) -> None:
    """Run a step on a backend and check the result, as the suite does.

    Parameters
    ----------
    backend : KernelBackend
    operation : {"attend", "append", "merge"}
        The operation to run and check.

    Raises
    ------
    Mismatch
        The result breaks a rule.
    """
    case = next(c for cases in CASES.values() for c in cases if c.id == _CASE[operation])
    without_gpu = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    with mock.patch.dict(os.environ, without_gpu):
        trial = Trial(cast("Backend", backend), case, SMALL, "float32")
        if operation == "append":
            trial.check_append()
        elif operation == "attend":
            trial.check_attention()
        else:
            _check_merge(backend, trial.problem)


def _check_merge(backend: KernelBackend, problem: Problem) -> None:
    parts = MERGES[0].build(problem.dims.kv_lora_rank)
    check_merge(backend.prepare(problem).merge(parts), merge(parts), parts)
