"""Run one mutant and record which checks find it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import changes, mutant
from paged_mla_conformance.meta.tolerances.asked import Asked, asked
from paged_mla_conformance.meta.tolerances.checks import (
    judges_bench,
    passes_bench,
    passes_kit,
    passes_kit_out,
)
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.tolerance.compare import Mismatch, check_bitwise
from paged_mla_shared.problem import Output


class Check(StrEnum):
    """The checks of outputs."""

    BITS = "bits"
    """Every bit must be equal. This check shows whether there is a difference to find."""
    BUDGETS = "budgets"
    """The budgets of the suite."""
    BENCH = "bench"
    """The tolerance of FlashInfer-Bench."""
    BENCH_EXPRESSED = "bench, expressed"
    """The same tolerance, only in cases that a definition of FlashInfer-Bench can express."""
    KIT = "kit"
    """The tolerance of SGLang's attention kit."""
    KIT_OUT = "kit, out"
    """The same tolerance without a check of the lse."""


@dataclass
class Verdict:
    """The checks that find a mutant.

    Parameters
    ----------
    name : str
        The name of the mutant.
    found : dict of Check to str
        For each check that refuses an output, the first case in which it does.
    """

    name: str
    found: dict[Check, str] = field(default_factory=dict)


def verdict(name: str) -> Verdict:
    """Run a mutant's attention over a filled cache, in every case, until each check refused it.

    All steps of a case run on one runner. An exception counts as refused by each check that applies
    to the case. No case runs for a mutant that does not change attention.
    """
    result = Verdict(name)
    if name in MUTANTS and "attend" not in changes(name):
        return result
    backend = mutant(name)
    for case in asked(backend.capabilities):
        checks = {check for check in Check if _asks(check, case)} - set(result.found)
        if checks:
            trial = replace(case.trial, backend=backend, checks=[])
            with np.errstate(all="ignore"):  # wrong outputs overflow
                noticing = _noticing(checks, trial, case)
            result.found |= dict.fromkeys(noticing, trial.case.dtype_id(trial.dtype))
    return result


def _noticing(checks: set[Check], trial: Trial, case: Asked) -> set[Check]:
    """Return the checks that refuse an output of a backend in a case; all if it raises an error."""
    noticing: set[Check] = set()
    try:
        answers = _answers(trial, case)
    except Exception:  # a wrong backend may raise anything
        return checks
    for (stage, right), actual in zip(case.steps, answers, strict=True):
        left = checks - noticing
        noticing |= {check for check in left if not _passes(check, trial, stage, actual, right)}
    return noticing


def _answers(trial: Trial, case: Asked) -> list[Output]:
    """Return the outputs of a backend for the steps of a case on one runner."""
    runner, found = trial.prepare(), []
    for stage, _ in case.steps:
        runner.load_cache(stage.after)
        answer = runner.attend(stage.batch)
        found.append(Output(answer.out.copy(), answer.lse.copy()))
    return found


def _asks(check: Check, case: Asked) -> bool:
    """Return whether a check applies to a case.

    FlashInfer-Bench refuses every infinite lse, so its checks apply only if each right lse is
    finite.
    """
    if check not in {Check.BENCH, Check.BENCH_EXPRESSED}:
        return True
    wanted = check is Check.BENCH or case.expressed
    return wanted and all(judges_bench(right) for _, right in case.steps)


def _passes(check: Check, trial: Trial, stage: Stage, actual: Output, right: Output) -> bool:
    if check is Check.BITS:
        return _holds(lambda: check_bitwise("S-5", actual, right, "the right output"))
    if check is Check.BUDGETS:
        same = _passes(Check.BITS, trial, stage, actual, right)
        return same or _holds(lambda: trial.hold(stage, actual))
    if check is Check.KIT:
        return passes_kit(actual, right)
    if check is Check.KIT_OUT:
        return passes_kit_out(actual, right)
    return passes_bench(actual, right)


def _holds(check: Callable[[], object]) -> bool:
    try:
        check()
    except Mismatch:
        return False
    return True
