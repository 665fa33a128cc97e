"""Find a factor or a summand by which the scale, the outputs or the lse are wrong.

If at most half of the heads are wrong, the hypotheses change only these heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import Errors, actual_output, errors_of
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.query_view import QueryView, views_of_wrong
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.faults.kernel.change import answering, scoring
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.rounding import Rounding, widen
from paged_mla_shared.problem import Batch, Output, Problem

_SHOWN = 6  # heads


@dataclass(frozen=True)
class _Heads:
    """The heads that a hypothesis changes."""

    ids: NDArray[np.int64]
    total: int

    @classmethod
    def wrong_in(cls, errors: Errors) -> _Heads:
        """Return the wrong heads; all heads if more than half of them or none are wrong."""
        wrong = np.asarray(errors.wrong.any(axis=0))
        total = len(wrong)
        some = 0 < 2 * wrong.sum() <= total
        return cls(np.flatnonzero(wrong) if some else np.arange(total), total)

    def named(self, what: str) -> str:
        """Return the name of a quantity, followed by the heads unless they are all heads."""
        if len(self.ids) == self.total:
            return what
        ids = ", ".join(map(str, self.ids[:_SHOWN]))
        more = len(self.ids) - _SHOWN
        return f"{what} of head {ids}" if more <= 0 else f"{what} of head {ids} and {more} more"

    def scaled(self, oracle: Oracle, factor: float) -> Oracle:
        """Return an oracle in which these heads use `factor` times the softmax scale."""

        def attend(
            problem: Problem, query: NDArray[Any], keys: NDArray[Any], rounding: Rounding
        ) -> QueryAnswer:
            query = widen(query).copy()
            query[self.ids] *= factor
            return attend_one(problem, query, keys, rounding)

        return scoring(oracle, attend)


def faults_of_numbers(found: Examination) -> Iterator[Hypothesis]:
    """Return the factors of the scale, of out and of lse that are nearest to the dump."""
    step, right = found.step, found.right
    if right is None:
        return
    actual = actual_output(step, right.rounded.output(step.problem.dtype))
    heads = _Heads.wrong_in(errors_of(step, right))
    for view in views_of_wrong(found, 1):
        yield from _scale(heads, view, widen(actual.lse[view.token]))
    lse, right_lse = widen(actual.lse)[:, heads.ids], right.exact.lse[:, heads.ids]
    seen = np.isfinite(right_lse) & np.isfinite(lse)
    if step.has("lse") and seen.any():
        yield from _of_lse(heads, lse[seen], right_lse[seen])
    if step.has("out"):
        yield from _of_out(heads, widen(actual.out)[:, heads.ids], right.exact.out[:, heads.ids])


def _scale(heads: _Heads, view: QueryView, lse: NDArray[np.float64]) -> Iterator[Hypothesis]:
    """Return the factor of the softmax scale whose lse is nearest to the dump's."""
    scores, lse = view.scores[heads.ids][:, view.seen], lse[heads.ids]
    if not np.isfinite(lse).all() or not np.isfinite(scores).all():
        return

    def far(factor: float) -> float:
        scaled = factor * scores
        highest = scaled.max(axis=1)
        found = highest + np.log(np.exp(scaled - highest[:, None]).sum(axis=1))
        return float(np.abs(found - lse).max())

    grid = np.geomspace(1 / 32, 32, 161)
    best = float(grid[np.argmin([far(factor) for factor in grid])])
    width = grid[1] / grid[0]
    for _ in range(80):  # the search around the best factor narrows in each round
        tries = best * np.array([width**-0.618, 1.0, width**0.618])
        best, width = float(tries[np.argmin([far(t) for t in tries])]), width**0.85
    if abs(best - 1) > 1e-4:
        name = f"{heads.named('the scale')} is {best:.6g} times the problem's"
        change = partial(heads.scaled, factor=best)
        yield Hypothesis(name, f"{name}.", change, ("S-5", "S-7"))


def _of_lse(
    heads: _Heads, lse: NDArray[np.float64], exact: NDArray[np.float64]
) -> Iterator[Hypothesis]:
    """Return the linear functions that map the right lse to the dump's lse."""
    summand = float(np.median(lse - exact))
    slope, start = np.polyfit(exact, lse, 1) if np.ptp(exact) > 0 else (1.0, summand)
    for factor, plus in ((1.0, summand), (float(slope), float(start))):
        name = f"{heads.named('lse')} is {factor:.6g} times what it should be, plus {plus:.6g}"

        def line(
            _p: Problem, _b: Batch, answer: Output, f: float = factor, a: float = plus
        ) -> Output:
            answer.lse[:, heads.ids] = f * widen(answer.lse[:, heads.ids]) + a
            return answer

        if abs(factor - 1) > 1e-4 or abs(plus) > 1e-4:
            yield Hypothesis(name, f"{name}.", partial(answering, change=line), ("S-7",))


def _of_out(
    heads: _Heads, out: NDArray[np.float64], exact: NDArray[np.float64]
) -> Iterator[Hypothesis]:
    """Return the factor between the dump's out and the right out."""
    usable = np.isfinite(out) & (np.abs(exact) > np.abs(exact).max(initial=0) / 8)
    if not usable.any():
        return
    factor = float(np.median(out[usable] / exact[usable]))
    name = f"{heads.named('out')} is {factor:.6g} times what it should be"

    def times(_p: Problem, _b: Batch, answer: Output) -> Output:
        answer.out[:, heads.ids] = widen(answer.out[:, heads.ids]) * factor
        return answer

    if abs(factor - 1) > 1e-3:
        yield Hypothesis(name, f"{name}.", partial(answering, change=times), ("S-5",))
