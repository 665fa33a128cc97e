"""Compute the errors of a dump's output, for each query token and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.examination import Right
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.rules.rounding import ulp, widen
from paged_mla_shared.problem import Output


@dataclass(frozen=True)
class Errors:
    """Errors of every query token and head.

    An error is infinite if only one of two numbers is finite, or if they are not finite and
    different.

    Parameters
    ----------
    out, lse : float64 [T, H]
        Absolute errors; for out, the largest of its elements.
    out_share, lse_share : float64 [T, H]
        Errors divided by their budgets: values above 1 are wrong.
    ulps : float64 [T, H, R]
        Signed errors of out, in units in the last place of the token's largest number; 0 where
        one of the two numbers is not finite.
    """

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    out_share: NDArray[np.float64]
    lse_share: NDArray[np.float64]
    ulps: NDArray[np.float64]

    @property
    def wrong(self) -> NDArray[np.bool_]:
        """Which query tokens and heads are wrong, bool [T, H]."""
        return np.asarray((self.out_share > 1) | (self.lse_share > 1))


def errors_of(step: Step, right: Right) -> Errors:
    """Return the errors of a dump's output (S-5, S-7)."""
    exact = right.exact
    actual = actual_output(step, right.exact.output("float32"))
    out, odd_out = differences(actual.out, exact.out)
    lse, odd_lse = differences(actual.lse, exact.lse)
    mine, numbers = widen(actual.out), np.isfinite(actual.out) & np.isfinite(exact.out)
    largest = np.abs(np.where(numbers, exact.out, 0.0)).max(axis=(1, 2), initial=0.0)
    spacing = ulp(largest, step.problem.dtype)[:, None, None]
    signed = (np.where(numbers, mine, 0.0) - np.where(numbers, exact.out, 0.0)) / spacing
    out = np.where(odd_out, np.inf, out).max(axis=2)
    lse = np.where(odd_lse, np.inf, lse)
    empty = np.isneginf(exact.lse)
    budget = np.where(empty, 0.0, right.out_budget[:, None])
    return Errors(out, lse, _share(out, budget), _share(lse, right.lse_budget), signed)


def actual_output(step: Step, answer: Output, prefix: str = "") -> Output:
    """Return the dump's output; a field that the dump lacks is taken from `answer`.

    Parameters
    ----------
    step : Step
    answer : Output
    prefix : str
        The prefix of both fields' names in the dump: "prefill_", "layer_", or "" for attention.
    """
    out = step.dump.arrays.get(f"{prefix}out", answer.out)
    lse = step.in_nats(f"{prefix}lse")
    return Output(out, answer.lse if lse is None else lse)


def differences(
    mine: NDArray[Any], theirs: NDArray[Any]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the absolute differences of finite numbers, and where numbers cannot be compared.

    Two numbers cannot be compared if they are not both finite, not equal, and not both NaN;
    their difference is returned as 0.
    """
    a, b = widen(mine), widen(theirs)
    both = np.isfinite(a) & np.isfinite(b)
    same = both | (a == b) | (np.isnan(a) & np.isnan(b))
    return np.abs(np.where(both, a, 0.0) - np.where(both, b, 0.0)), ~same


def _share(error: NDArray[np.float64], budget: NDArray[np.float64]) -> NDArray[np.float64]:
    with np.errstate(divide="ignore", invalid="ignore"):
        share = error / budget
    return np.where((error == 0) | np.isnan(share), 0.0, share)  # a NaN budget checks no value
