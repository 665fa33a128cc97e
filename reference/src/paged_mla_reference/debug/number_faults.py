"""Numbers that are off by a factor or a summand: the scale, the outputs, the lse."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from paged_mla_reference.debug.errors import actual_output
from paged_mla_reference.debug.examination import Examination
from paged_mla_reference.debug.hypothesis import Hypothesis
from paged_mla_reference.debug.query_view import QueryView, views_of_wrong
from paged_mla_reference.deviations.change import answering, posed
from paged_mla_reference.rounding import widen
from paged_mla_shared.problem import Batch, Output, Problem


def faults_of_numbers(found: Examination) -> Iterator[Hypothesis]:
    """Return the factor of the scale, of outputs and of lse that comes nearest."""
    step, right = found.step, found.right
    if right is None:
        return
    actual = actual_output(step, right.rounded.output(step.problem.dtype))
    for view in views_of_wrong(found, 1):
        yield from _scale(view, widen(actual.lse[view.token]))
    seen = np.isfinite(right.exact.lse) & np.isfinite(actual.lse)
    if step.has("lse") and seen.any():
        yield from _of_lse(widen(actual.lse[seen]), right.exact.lse[seen])
    out, exact = widen(actual.out), right.exact.out
    usable = np.isfinite(out) & (np.abs(exact) > np.abs(exact).max(initial=0) / 8)
    if step.has("out") and usable.any():
        factor = float(np.median(out[usable] / exact[usable]))
        name = f"out is {factor:.6g} times what it should be"

        def times(_p: Problem, _b: Batch, answer: Output) -> Output:
            return Output((widen(answer.out) * factor).astype(answer.out.dtype), answer.lse)

        if abs(factor - 1) > 1e-3:
            yield Hypothesis(name, f"{name}.", lambda o: answering(o, times), ("S-5",))


def _scale(view: QueryView, lse: np.ndarray) -> Iterator[Hypothesis]:
    """Return the factor of the softmax scale whose lse is nearest."""
    scores = view.scores[:, view.seen]
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
    for _ in range(80):  # golden sections of the best one's neighbourhood
        tries = best * np.array([width**-0.618, 1.0, width**0.618])
        best, width = float(tries[np.argmin([far(t) for t in tries])]), width**0.85
    if abs(best - 1) > 1e-4:
        name = f"the scale is {best:.6g} times the problem's"
        yield Hypothesis(
            name,
            f"{name}.",
            lambda o: posed(o, lambda p: replace(p, softmax_scale=p.softmax_scale * best)),
            ("S-5", "S-7"),
        )


def _of_lse(lse: np.ndarray, exact: np.ndarray) -> Iterator[Hypothesis]:
    """Return the line that leads from right lse to those of the dump."""
    summand = float(np.median(lse - exact))
    slope, start = np.polyfit(exact, lse, 1) if np.ptp(exact) > 0 else (1.0, summand)
    for factor, plus in ((1.0, summand), (float(slope), float(start))):
        name = f"lse is {factor:.6g} times what it should be, plus {plus:.6g}"

        def line(
            _p: Problem, _b: Batch, answer: Output, f: float = factor, a: float = plus
        ) -> Output:
            return Output(answer.out, (f * widen(answer.lse) + a).astype(np.float32))

        if abs(factor - 1) > 1e-4 or abs(plus) > 1e-4:
            yield Hypothesis(name, f"{name}.", partial(answering, change=line), ("S-7",))
