"""One mutant, and what each check says of its answers."""

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
    """What answers are held to, and over which cases."""

    BITS = "bits"
    """Every bit, which tells whether there is anything to find."""
    BUDGETS = "budgets"
    """The suite's."""
    BENCH = "bench"
    """FlashInfer-Bench's tolerance."""
    BENCH_EXPRESSED = "bench, expressed"
    """The same, over cases that a definition of FlashInfer-Bench can ask."""
    KIT = "kit"
    """The tolerance of SGLang's kit."""
    KIT_OUT = "kit, out"
    """The same, where nobody looks at the lse."""


@dataclass
class Verdict:
    """What checks say of a mutant.

    Parameters
    ----------
    name : str
    found : dict of Check to str
        For each check that notices the mutant, the first case by which it does.
    """

    name: str
    found: dict[Check, str] = field(default_factory=dict)


def verdict(name: str) -> Verdict:
    """Ask a mutant for attention over a filled cache, in every case, until each check has noticed.

    Steps of a case are asked of one runner, one after the other. An exception is noticed by each
    check that asks the case.
    """
    result = Verdict(name)
    if name in MUTANTS and "attend" not in changes(name):
        return result
    backend = mutant(name)
    for case in asked(backend.capabilities):
        checks = {check for check in Check if _asks(check, case)} - set(result.found)
        if checks:
            trial = replace(case.trial, backend=backend, checks=[])
            with np.errstate(all="ignore"):  # wrong answers overflow
                noticing = _noticing(checks, trial, case)
            result.found |= dict.fromkeys(noticing, trial.case.dtype_id(trial.dtype))
    return result


def _noticing(checks: set[Check], trial: Trial, case: Asked) -> set[Check]:
    """Return which checks notice what a backend answers to a case."""
    noticing: set[Check] = set()
    try:
        answers = _answers(trial, case)
    except Exception:  # whatever a wrong backend raises
        return checks
    for (stage, right), actual in zip(case.steps, answers, strict=True):
        left = checks - noticing
        noticing |= {check for check in left if not _passes(check, trial, stage, actual, right)}
    return noticing


def _answers(trial: Trial, case: Asked) -> list[Output]:
    """Return what a backend answers to the steps of a case, on one runner."""
    runner, found = trial.prepare(), []
    for stage, _ in case.steps:
        runner.load_cache(stage.after)
        answer = runner.attend(stage.batch)
        found.append(Output(answer.out.copy(), answer.lse.copy()))
    return found


def _asks(check: Check, case: Asked) -> bool:
    """Return whether a check is of a case: FlashInfer-Bench's refuses every infinite lse."""
    if check not in {Check.BENCH, Check.BENCH_EXPRESSED}:
        return True
    wanted = check is Check.BENCH or case.expressed
    return wanted and all(judges_bench(right) for _, right in case.steps)


def _passes(check: Check, trial: Trial, stage: Stage, actual: Output, right: Output) -> bool:
    if check is Check.BITS:
        return _holds(lambda: check_bitwise("S-5", actual, right, "the right answer"))
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
