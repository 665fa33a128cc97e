"""What is known of a dump once it is checked: findings, and what the rules make of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.answers import both_answers
from paged_mla_reference.explain.checks.finding import Finding, Stage, State
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.compare import Check, Mismatch
from paged_mla_reference.tolerance.fast import Allowance, fast_answers, may_be_fast
from paged_mla_reference.tolerance.layers import RightLayer
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Output, Problem, Rows

Given = TypeVar("Given", Answer, Output)


@dataclass(frozen=True)
class Right:
    """What the rules make of the step, as far as the dump lets them.

    Parameters
    ----------
    exact, rounded : Answer
    out_budget : float64 [T]
    lse_budget : float64 [T, H]
    allowance : Allowance or None
        Of products of 8 bits, where the dump allows them.
    """

    exact: Answer
    rounded: Answer
    out_budget: NDArray[np.float64]
    lse_budget: NDArray[np.float64]
    allowance: Allowance | None = None

    @classmethod
    def of(cls, step: Step, batch: Batch, image: CacheImage) -> Right:
        """Compute it (S-4 to S-7)."""
        problem = step.problem
        exact, rounded = both_answers(problem, batch, image)
        keys, terms = keys_of_tokens(batch), batch.query_width
        allowance = None
        if may_be_fast(problem, step.dump.products):
            rounded, allowance = fast_answers(problem, batch, image)
        out = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)
        lse = budgets.lse_budget(exact, rounded, keys, terms)
        if allowance is not None:
            out, lse = out + allowance.out.max(axis=(1, 2), initial=0.0), lse + allowance.lse
        return cls(exact, rounded, out, lse, allowance)

    @classmethod
    def of_prefill(cls, problem: Problem, batch: PrefillBatch) -> Right:
        """Compute that of a prefill (S-4 to S-7, S-21)."""
        exact, rounded = (prefill(problem, batch, rounding) for rounding in Rounding)
        keys, terms = keys_of_tokens(batch), batch.query_width
        out = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)
        return cls(exact, rounded, out, budgets.lse_budget(exact, rounded, keys, terms))


@dataclass
class Examination:
    """All findings of a dump, and what was computed on the way.

    Parameters
    ----------
    step : Step
    findings : list of Finding
    right, right_prefill : Right or None
        ``None`` where attention, or a prefill, could not be recomputed.
    right_layer : RightLayer or None
        Of a whole layer, likewise.
    """

    step: Step
    findings: list[Finding]
    right: Right | None = None
    right_prefill: Right | None = None
    right_layer: RightLayer | None = None

    @property
    def first(self) -> Finding | None:
        """The first broken rule, ``None`` if none is."""
        return next((f for f in self.findings if f.state is State.BROKEN), None)


def lacking_in(step: Step, *names: str) -> str:
    """Return the sentence that names missing fields; "" if there are all."""
    lacking = [name for name in names if not step.has(name)]
    return f"the dump has no {', '.join(lacking)}" if lacking else ""


def hold(found: Examination, stage: Stage, what: str, check: Any) -> None:
    """Note what a comparison says."""
    try:
        found.findings.append(Finding.held(stage, what, check()))
    except Mismatch as mismatch:
        found.findings.append(Finding.broken(stage, what, mismatch))


def are_numbers(exact: Answer) -> NDArray[np.bool_]:
    """Return which tokens have a right answer that is one, bool [T].

    Others have queries, or see keys, that are no finite numbers: whatever they get is not held.
    """
    return np.asarray(np.isfinite(exact.out).all(axis=(1, 2)) & (exact.lse < np.inf).all(axis=1))


def unknown_tokens(
    found: Examination, stage: Stage, batch: Rows, exact: Answer
) -> NDArray[np.bool_]:
    """Return which tokens have no right answer that is a number, bool [T], and note them."""
    tokens = ~are_numbers(exact)
    if tokens.any():
        detail = f"what {int(tokens.sum())} tokens see is no finite number: "
        detail += describe(tokens, batch)
        found.findings.append(Finding.undecided(stage, "out, lse of what is no number", detail))
    return tokens


def blinded(answer: Given, tokens: NDArray[np.bool_]) -> Given:
    """Return an answer in which these tokens see nothing."""
    if not tokens.any():
        return answer
    arrays = {name: array.copy() for name, array in vars(answer).items()}
    for name, array in arrays.items():
        array[tokens] = -np.inf if name == "lse" else 0
    return replace(answer, **arrays)


def hold_answer(
    found: Examination,
    stage: Stage,
    prefix: str,
    answers: tuple[Output, Output],
    check: Callable[[Output], list[Check]],
) -> None:
    """Note what a comparison says of out and of lse, each held with the other one right.

    Parameters
    ----------
    found : Examination
    stage : Stage
    prefix : str
        Of both fields' names in the dump.
    answers : (Output, Output)
        The dump's, and a right one.
    check : callable
    """
    actual, right = answers
    alone = {"out": Output(actual.out, right.lse), "lse": Output(right.out, actual.lse)}

    def checks(what: str) -> list[Check]:
        return [one for one in check(alone[what]) if one.what == what]

    for what in alone:
        if found.step.has(f"{prefix}{what}"):
            hold(found, stage, what, partial(checks, what))
        else:
            lacking = lacking_in(found.step, f"{prefix}{what}")
            found.findings.append(Finding.undecided(stage, what, lacking))
