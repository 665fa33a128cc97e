"""Comparison of results with the oracle's; a mismatch reports the rule, the place and the error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.fast import Allowance, gain_of
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.problem import Batch, Metadata, Output, Problem, Rows

_FEWEST_OF_A_FACTOR = 3  # numbers; two numbers may have a common factor by chance


class Mismatch(AssertionError):
    """A result that the rules forbid.

    Parameters
    ----------
    rule : str
        Id of the broken rule.
    what : str
        Name of the wrong array.
    detail : str
    at : tuple of int
        Coordinate of the first wrong element, token first; empty if it is unknown.
    """

    def __init__(self, rule: str, what: str, detail: str, at: tuple[int, ...] = ()) -> None:
        self.rule = rule
        self.at = at
        super().__init__(f"[{rule}] {what}: {detail}")


@dataclass(frozen=True)
class Check:
    """A passed comparison: the error that is the largest part of its budget, and this budget."""

    what: str
    error: float
    budget: float


def check_output(
    problem: Problem,
    batch: Rows,
    actual: Output,
    exact: Answer,
    rounded: Answer,
    *,
    allowance: Allowance | None = None,
    keys: NDArray[np.int64] | None = None,
) -> list[Check]:
    """Compare an attention output with the oracle's (S-5, S-6, S-7).

    Tokens that the oracle did not compute (its ``lse`` is NaN) must only have finite numbers that
    are not all 0.

    Parameters
    ----------
    problem : Problem
    batch : Rows
    actual : Output
        The output of the backend.
    exact, rounded : Answer
        The exact output of the oracle, and its output rounded where the specification rounds.
    allowance : Allowance, optional
        Added to the budgets (:mod:`paged_mla_reference.tolerance.fast`).
    keys : int64 [T], optional
        The numbers of keys that determine the errors of sums. By default they are those of the rows
        (:func:`~paged_mla_reference.tolerance.single.keys_of_sums`).

    Returns
    -------
    list of Check

    Raises
    ------
    Mismatch
    """
    same_form("out", actual.out, exact.out.shape, problem.dtype)
    same_form("lse", actual.lse, exact.lse.shape, "float32")
    _same_anomalies(actual, exact, batch)
    out = widen(actual.out)
    empty = np.isneginf(exact.lse)
    if np.any(out[empty] != 0):
        wrong = empty & (out != 0).any(axis=-1)
        raise _mismatch("S-6", "out", "not 0, where the query sees no key", wrong, batch)
    unanswered = np.isnan(exact.lse) & (out == 0).all(axis=-1)
    if unanswered.any():
        raise _mismatch("S-5", "out", "0, where the query sees keys", unanswered, batch)
    asked = np.flatnonzero(~np.isnan(exact.lse).any(axis=1))
    exact, rounded = _of_tokens(exact, asked), _of_tokens(rounded, asked)
    seen = ~np.isneginf(exact.lse)
    lse = np.where(seen, widen(actual.lse[asked]), 0.0)
    keys = (keys_of_tokens(batch) if keys is None else keys)[asked]
    terms = batch.query_width
    budget = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)[:, None, None]
    lse_budget = budgets.lse_budget(exact, rounded, keys, terms)
    if allowance is not None:
        allowance = allowance.of_tokens(asked)
        budget = budget + allowance.out.max(axis=(1, 2), keepdims=True)
        lse_budget = lse_budget + allowance.lse
    exact_lse = np.where(seen, exact.lse, 0.0)
    place = Place(batch, asked)
    checks = [
        _within("S-5", "out", out[asked], exact.out, budget, place=place),
        _within("S-7", "lse", lse, exact_lse, lse_budget, place=place),
    ]
    if allowance is not None and np.isfinite(allowance.gain).any():
        checks.append(_check_gain(problem.dtype, out[asked], exact.out, rounded.out, allowance))
    return checks


def _check_gain(
    dtype: str,
    out: NDArray[np.float64],
    exact: NDArray[np.float64],
    rounded: NDArray[np.float64],
    allowance: Allowance,
) -> Check:
    """Check the mean gain of a step's queries, which budgets of single elements do not limit."""
    counts = allowance.gain**-2.0  # [n, H]; 0 where the gain is not limited
    gain, own, bias = (
        (counts * x).sum() / counts.sum()
        for x in (gain_of(out, exact), gain_of(rounded, exact), allowance.bias)
    )
    budget = budgets.gain_budget(dtype, own, bias, counts.sum() ** -0.5)
    if not abs(gain) <= budget:
        detail = f"{gain:+.3g} of the length of the exact outputs, budget {budget:.3g}"
        raise Mismatch("S-5", "mean gain of out", f"{detail}, over all queries of the step")
    return Check("mean gain of out", float(abs(gain)), budget)


@dataclass(frozen=True)
class Place:
    """The origin of compared arrays: their first axis lists the `tokens` of `batch`."""

    batch: Rows
    tokens: NDArray[np.int64]

    def describe(self, wrong: NDArray[np.bool_]) -> str:
        """Describe the common properties of the wrong elements [n, H, ...]."""
        whole = np.zeros((self.batch.num_tokens, wrong.shape[1]), bool)
        whole[self.tokens] = wrong if wrong.ndim == 2 else wrong.any(axis=-1)
        return describe(whole, self.batch)


def _of_tokens(answer: Answer, tokens: NDArray[np.int64]) -> Answer:
    return Answer(
        answer.out[tokens],
        answer.lse[tokens],
        answer.score_bound[tokens],
        answer.value_bound[tokens],
        answer.turn_error[tokens],
    )


def _mismatch(rule: str, what: str, detail: str, wrong: NDArray[np.bool_], batch: Rows) -> Mismatch:
    """Return a mismatch at the first of the `wrong` queries [T, H]."""
    return Mismatch(rule, what, f"{detail}: {describe(wrong, batch)}", first(wrong))


def check_merge(actual: Output, expected: Output, partials: list[Output]) -> list[Check]:
    """Compare a merged result with the oracle's (S-8).

    Raises
    ------
    Mismatch
    """
    same_form("out", actual.out, expected.out.shape, "float32")
    same_form("lse", actual.lse, expected.lse.shape, "float32")
    exact = Answer(
        widen(expected.out),
        widen(expected.lse),
        *np.zeros((3, *expected.lse.shape)),
    )
    _same_anomalies(actual, exact, None, rule="S-8")
    out_budget, lse_budget = budgets.merge_budget(partials)
    seen = np.isfinite(expected.lse)
    return [
        _within("S-8", "out", actual.out, expected.out, out_budget[:, :, None]),
        _within(
            "S-8",
            "lse",
            np.where(seen, actual.lse, 0.0),
            np.where(seen, expected.lse, 0.0),
            lse_budget,
        ),
    ]


def both_budgets(
    problem: Problem, batch: Rows, exact: Answer, rounded: Answer
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the largest allowed difference of two correct outputs: out [T], lse [T, H]."""
    keys, terms = keys_of_tokens(batch), batch.query_width
    out = budgets.out_budget(problem.dtype, exact, rounded, keys, terms)
    return 2 * out, 2 * budgets.lse_budget(exact, rounded, keys, terms)


def check_same(
    rule: str,
    actual: Output,
    expected: Output,
    allowed: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> list[Check]:
    """Check that two outputs of a backend differ by at most `allowed`: out [T], lse [T, H].

    Every query of the step sees at least one key.

    Raises
    ------
    Mismatch
    """
    same_form("out", actual.out, expected.out.shape, dtype_name(actual.out.dtype))
    out = _within(rule, "out", actual.out, expected.out, allowed[0][:, None, None])
    return [out, _within(rule, "lse", actual.lse, expected.lse, allowed[1])]


def check_layer(
    batch: Rows,
    actual: Output,
    exact: Answer,
    allowed: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> list[Check]:
    """Compare the output of a layer with the oracle's (S-6, S-9, S-21).

    Raises
    ------
    Mismatch
    """
    same_form("out", actual.out, exact.out.shape, dtype_name(actual.out.dtype))
    same_form("lse", actual.lse, exact.lse.shape, "float32")
    _same_anomalies(actual, exact, batch)
    empty = np.isneginf(exact.lse)
    wrong = empty & (actual.out != 0).any(axis=-1)
    if wrong.any():
        raise _mismatch("S-6", "out", "not 0, where the query sees no key", wrong, batch)
    place = Place(batch, np.arange(batch.num_tokens))
    lse, exact_lse = (np.where(empty, 0.0, x) for x in (actual.lse, exact.lse))
    out_budget, lse_budget = allowed[0][:, None, None], np.where(empty, 0.0, allowed[1])
    return [
        _within("S-21", "out", actual.out, exact.out, out_budget, place=place),
        _within("S-21", "lse", lse, exact_lse, lse_budget, place=place),
    ]


def check_metadata(batch: Batch, actual: Metadata, expected: Metadata) -> list[Check]:
    """Check that positions and slots are equal to the expected ones (S-1, S-3).

    Raises
    ------
    Mismatch
    """
    for rule, what in (("S-3", "positions"), ("S-1", "slot_mapping")):
        mine, theirs = getattr(actual, what), getattr(expected, what)
        same_form(what, mine, theirs.shape, "int64")
        if not np.array_equal(mine, theirs):
            at = first(mine != theirs)
            detail = f"first wrong at {at}: {mine[at]}, expected {theirs[at]}"
            raise Mismatch(rule, what, f"{detail}; {describe(mine != theirs, batch)}", at)
    return [Check("positions", 0.0, 0.0), Check("slot_mapping", 0.0, 0.0)]


def check_bitwise(rule: str, actual: Output, expected: Output, why: str) -> list[Check]:
    """Check that two outputs have the same bits.

    Raises
    ------
    Mismatch
    """
    for what in ("out", "lse"):
        a, b = getattr(actual, what), getattr(expected, what)
        if a.shape != b.shape or a.tobytes() != b.tobytes():
            raise Mismatch(rule, what, f"bits differ: {why}")
    return [Check(f"bitwise: {why}", 0.0, 0.0)]


def same_form(what: str, array: NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
    """Check the shape and the dtype of a result.

    Raises
    ------
    Mismatch
    """
    if array.shape != shape:
        raise Mismatch("S-5", what, f"shape {array.shape}, expected {shape}")
    if dtype_name(array.dtype) != dtype:
        raise Mismatch("S-5", what, f"dtype {array.dtype}, expected {dtype}")


def _same_anomalies(
    actual: Output, exact: Answer, batch: Rows | None, *, rule: str | None = None
) -> None:
    """Check that there is no NaN, and no infinity except lse = -inf of queries that see no key.

    A NaN of a query that sees keys may have been read (S-9) or computed; one output does not show
    which. An infinite lse of a query that sees keys is wrong (S-7).

    Parameters
    ----------
    rule : str or None
        The rule that every anomaly breaks. ``None`` chooses S-6, S-7 or S-9 for each anomaly.

    Raises
    ------
    Mismatch
    """
    wrong = ~np.isfinite(actual.out.astype(np.float32))
    if wrong.any():
        at = first(wrong)
        sees = not np.isneginf(exact.lse[at[:2]])
        detail = f"{actual.out[at]} at {at}, where the query sees {'keys' if sees else 'no key'}"
        detail += _scores(exact, at[:2]) + _pattern(np.any(wrong, axis=-1), batch)
        raise Mismatch(rule or ("S-9" if sees else "S-6"), "out", detail, at)
    wrong = np.isneginf(actual.lse) != np.isneginf(exact.lse)
    wrong |= np.isnan(actual.lse) | np.isposinf(actual.lse)
    if wrong.any():
        at = first(wrong)
        detail = f"{actual.lse[at]} at {at}, expected {exact.lse[at]}{_pattern(wrong, batch)}"
        sees = not np.isneginf(exact.lse[at])
        found = ("S-9" if np.isnan(actual.lse[at]) else "S-7") if sees else "S-6"
        raise Mismatch(rule or found, "lse", detail, at)


def _scores(exact: Answer, at: tuple[int, ...]) -> str:
    """Return the range of a query's scores, if it is known, after a semicolon."""
    bound = exact.score_bound[at]
    if not bound > 0:
        return ""
    return f"; its exact lse is {exact.lse[at]:.4g}, its scores are within +-{bound:.3g}"


def _pattern(wrong: NDArray[np.bool_], batch: Rows | None) -> str:
    return "" if batch is None else f"; {describe(wrong, batch)}"


def _within(
    rule: str,
    what: str,
    actual: NDArray[Any],
    exact: NDArray[Any],
    budget: NDArray[np.float64],
    *,
    place: Place | None = None,
) -> Check:
    """Check that the error of every element is within its budget."""
    error = np.abs(widen(actual) - widen(exact))
    allowed = np.broadcast_to(budget, error.shape)
    wrong = ~(error <= allowed)  # NaN never satisfies a budget
    if wrong.any():
        at = first(wrong)
        detail = (
            f"{float(actual[at]):.8g}, exact {float(exact[at]):.8g}, "
            f"error {error[at]:.3g}, budget {allowed[at]:.3g}"
        )
        count = f"{int(wrong.sum())} of {error.size} elements past their budget"
        if place is not None:
            at = (int(place.tokens[at[0]]), *at[1:])
            detail += f"; {place.describe(wrong)}"
        if rule == "S-7":
            detail += _times_a_factor(actual, exact, allowed)
        raise Mismatch(rule, what, f"{count}, first at {at}: {detail}", at)
    if not error.size:
        return Check(what, 0.0, 0.0)
    tightest = np.unravel_index(np.argmax(error / np.maximum(allowed, 1e-300)), error.shape)
    return Check(what, float(error[tightest]), float(allowed[tightest]))


def _times_a_factor(actual: NDArray[Any], exact: NDArray[Any], allowed: NDArray[np.float64]) -> str:
    """Return the factor by which every lse is wrong, if there is one, after a semicolon.

    The factor comes from another base of the logarithms. If each query sees one key, it may also
    come from a wrong scale.
    """
    for factor, base in ((math.log(2), "2"), (math.log(10), "10")):
        if (np.abs(factor * actual - exact) <= 2 * allowed).all():
            return f"; every lse is right in base {base}, but S-7 requires natural logarithms"
    seen = exact != 0
    if seen.sum() < _FEWEST_OF_A_FACTOR:
        return ""
    factor = float(np.median(actual[seen] / exact[seen]))
    if (np.abs(actual - factor * exact) <= 2 * allowed).all():
        return f"; every lse is {factor:.6g} times the exact lse"
    return ""


def first(where: NDArray[np.bool_]) -> tuple[int, ...]:
    """Return the coordinate of the first true element."""
    return tuple(int(i) for i in np.argwhere(where)[0])
