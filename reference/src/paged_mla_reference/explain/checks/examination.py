"""The result of checking a dump: its findings, and the step's right outputs."""

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
from paged_mla_reference.rules.masks import keys_seen
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.compare import Check, Mismatch
from paged_mla_reference.tolerance.fast import Allowance, fast_answers, may_be_fast
from paged_mla_reference.tolerance.layers import RightLayer
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_reference.tolerance.single import equal_values, keys_of_sums
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Output, Problem, Rows

Given = TypeVar("Given", Answer, Output)


@dataclass(frozen=True)
class Right:
    """The right output of a step, and the errors that are allowed.

    Parameters
    ----------
    exact, rounded : Answer
        Without rounding, and rounded where the rules round.
    out_budget : float64 [T]
        The largest allowed error of each token's out.
    lse_budget : float64 [T, H]
        The largest allowed error of lse.
    keys : int64 [T]
        The numbers of keys that determine the errors of sums.
    allowance : Allowance or None
        The additional error of 8-bit products, if the dump allows them.
    """

    exact: Answer
    rounded: Answer
    out_budget: NDArray[np.float64]
    lse_budget: NDArray[np.float64]
    keys: NDArray[np.int64]
    allowance: Allowance | None = None

    @classmethod
    def of(cls, step: Step, batch: Batch, image: CacheImage) -> Right:
        """Compute the right output of a step's attention over a cache (S-4 to S-7)."""
        problem = step.problem
        exact, rounded = both_answers(problem, batch, image)
        counts = equal_values(problem, batch, image, keys_seen(problem, batch))
        keys = keys_of_sums(problem, batch, counts)
        allowance, terms = None, batch.query_width
        if may_be_fast(problem, step.dump.products):
            rounded, allowance = fast_answers(problem, batch, image)
        out = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)
        lse = budgets.lse_budget(exact, rounded, keys, terms)
        if allowance is not None:
            out, lse = out + allowance.out.max(axis=(1, 2), initial=0.0), lse + allowance.lse
        return cls(exact, rounded, out, lse, keys, allowance)

    @classmethod
    def of_prefill(cls, problem: Problem, batch: PrefillBatch) -> Right:
        """Compute the right output of a prefill (S-4 to S-7, S-21)."""
        exact, rounded = (prefill(problem, batch, rounding) for rounding in Rounding)
        keys, terms = keys_of_tokens(batch), batch.query_width
        out = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)
        return cls(exact, rounded, out, budgets.lse_budget(exact, rounded, keys, terms), keys)


@dataclass
class Examination:
    """All findings of a dump, and the right outputs that the checks computed.

    Parameters
    ----------
    step : Step
    findings : list of Finding
        In the order of the checks.
    right, right_prefill : Right or None
        The right outputs of attention and of a prefill; ``None`` if they were not recomputed.
    right_layer : RightLayer or None
        The right output of a whole layer; ``None`` if it was not recomputed.
    """

    step: Step
    findings: list[Finding]
    right: Right | None = None
    right_prefill: Right | None = None
    right_layer: RightLayer | None = None

    @property
    def first(self) -> Finding | None:
        """The finding of the first broken rule; ``None`` if no rule is broken."""
        return next((f for f in self.findings if f.state is State.BROKEN), None)


def lacking_in(step: Step, *names: str) -> str:
    """Return a clause that names the missing fields; "" if the dump has all of them."""
    lacking = [name for name in names if not step.has(name)]
    return f"the dump has no {', '.join(lacking)}" if lacking else ""


def hold(found: Examination, stage: Stage, what: str, check: Any) -> None:
    """Run a comparison and add its result to the findings."""
    try:
        found.findings.append(Finding.held(stage, what, check()))
    except Mismatch as mismatch:
        found.findings.append(Finding.broken(stage, what, mismatch))


def are_numbers(exact: Answer) -> NDArray[np.bool_]:
    """Return which tokens have a right output without NaN and infinite values, bool [T].

    Other tokens have queries, or see keys, with NaN or infinite values: their outputs are not
    checked. An lse of -inf is allowed.
    """
    return np.asarray(np.isfinite(exact.out).all(axis=(1, 2)) & (exact.lse < np.inf).all(axis=1))


def unknown_tokens(
    found: Examination, stage: Stage, batch: Rows, exact: Answer
) -> NDArray[np.bool_]:
    """Return the tokens whose outputs are not checked (not :func:`are_numbers`), bool [T].

    If there are any, an undecided finding is added.
    """
    tokens = ~are_numbers(exact)
    if tokens.any():
        detail = f"{int(tokens.sum())} tokens have NaN or infinite queries or keys: "
        detail += describe(tokens, batch)
        found.findings.append(Finding.undecided(stage, "out, lse of tokens with NaN", detail))
    return tokens


def blinded(answer: Given, tokens: NDArray[np.bool_]) -> Given:
    """Return the output as if these tokens saw no keys: their lse is -inf, all else is 0."""
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
    """Check out and lse separately, and add both results to the findings.

    Each of the two is compared while the other one is replaced by its right value.

    Parameters
    ----------
    found : Examination
    stage : Stage
    prefix : str
        The prefix of both fields' names in the dump.
    answers : (Output, Output)
        The dump's output, and the right output.
    check : callable
        Compares an output with the right one; raises ``Mismatch`` if it is wrong.
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
