"""Rank hypotheses by the errors that they do not explain.

In a large step all hypotheses are tried on a few tokens, the best ones on more tokens, and the
first one on all tokens. If no hypothesis explains an error on the few tokens, all hypotheses are
tried again on more tokens. If none explains all errors, known faults are tried again as faults of
some rows.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import errors_of
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.explain.hypotheses.fault_in_some_rows import faults_in_some_rows
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis, catalogued
from paged_mla_reference.explain.hypotheses.ordinary import breadth
from paged_mla_reference.explain.hypotheses.residual import (
    Measure,
    Residual,
    can_be_tried,
    measure_of,
)
from paged_mla_reference.explain.hypotheses.single_faults import single_faults
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import keys_of_tokens

FEW_PAIRS = 1 << 15  # pairs of a key and a head in the first round, with every hypothesis
MORE_PAIRS = 1 << 20  # pairs of a key and a head in the second round
_CLOSER = 0.8  # below this share of the rms without the hypothesis, an rms is clearly smaller
_CLOSE = 1 / 16  # of a budget; the comparison in powers of two treats all smaller rms as equal
_IN_TURN = (Stage.APPEND, Stage.QUERIES)  # their faults patch modules, so they run one at a time
_KEPT = 8  # hypotheses in the second round


@dataclass(frozen=True)
class Fit:
    """A hypothesis compared with the dump.

    Parameters
    ----------
    hypothesis : Hypothesis
    residual : Residual
        The errors that remain in the stage of the first broken rule.
    elsewhere : int
        The number of additional errors that it causes in other stages.
    """

    hypothesis: Hypothesis
    residual: Residual
    elsewhere: int

    @property
    def fits(self) -> bool:
        """Whether it explains all errors of its stage and adds no errors to other stages."""
        return self.residual.wrong == 0 and self.elsewhere == 0

    @property
    def explains(self) -> tuple[float, ...]:
        """The number of errors, and the rms of `residual`.

        The errors are those that remain and those that the hypothesis causes in other stages. The
        rms is rounded so that equal predictions are equal.
        """
        return (self.residual.wrong + self.elsewhere, round(self.residual.rms, 3))

    @property
    def order(self) -> tuple[float, ...]:
        """The sort key (:func:`order_of`)."""
        return order_of(self.hypothesis, *self.explains)


class _AnyFit(Protocol):
    """A hypothesis compared with one dump or with several."""

    @property
    def hypothesis(self) -> Hypothesis: ...
    @property
    def fits(self) -> bool: ...
    @property
    def explains(self) -> tuple[float, ...]: ...


T = TypeVar("T", bound=_AnyFit)


def order_of(hypothesis: Hypothesis, wrong: float, rms: float) -> tuple[float, ...]:
    """Return the sort key of a hypothesis that leaves `wrong` errors, with root mean square `rms`.

    Fewer errors come first, then a smaller rms, in powers of two. Then known faults precede single
    faults, a smaller rms precedes a larger one, and more reports precede fewer.
    """
    coarse = math.ceil(math.log2(max(rms, _CLOSE)))
    reports = len(hypothesis.citations) + len(hypothesis.akin) / 100
    return (wrong, coarse, not hypothesis.known, rms, -reports)


def rank(found: Examination) -> list[Fit]:
    """Return the hypotheses that make the errors fewer or clearly smaller, the best first.

    There are none if no rule is broken or the stage of the first broken rule cannot be tried. In a
    large step most residuals count only a sample of the tokens.
    """
    first = found.first
    if first is None or not can_be_tried(found, first.stage):
        return []
    stage = first.stage
    fits = _ranked(found, stage, [*catalogued(stage), *single_faults(found, stage)])
    if stage is Stage.ATTENTION and not any(fit.fits for fit in fits):
        more = _ranked(found, stage, list(faults_in_some_rows(found)))
        fits = [*(fit for fit in more if fit.fits), *fits]
    return narrowest_first(fits)


def _ranked(found: Examination, stage: Stage, hypotheses: list[Hypothesis]) -> list[Fit]:
    """Return the sorted fits of hypotheses, tried in rounds."""
    others = [other for other in Stage if other is not stage and can_be_tried(found, other)]
    fits: list[Fit] = []
    for asked, kept in _rounds(found, stage):
        measure = measure_of(found, stage, asked)
        rest = [measure_of(found, other, asked) for other in others]
        tried = [fit.hypothesis for fit in fits[:kept]] if fits else hypotheses
        fits = _tried(tried, measure, rest, in_turn=stage in _IN_TURN) + fits[kept:]
    return fits


def narrowest_first(fits: Sequence[T]) -> list[T]:
    """Return fits in their order, except for ties.

    Known faults that tie for the first place and explain everything are sorted by breadth, the
    narrowest first.
    """
    tied = [f for f in fits if f.hypothesis.known and f.explains == fits[0].explains]
    if len(tied) < 2 or not tied[0].fits:
        return list(fits)
    tied.sort(key=lambda f: breadth(f.hypothesis))
    others = [f for f in fits if f not in tied]
    return [*tied, *others]


def harms(found: Examination, hypothesis: Hypothesis) -> bool:
    """Return whether a hypothesis raises an exception or makes a stage worse.

    A stage is worse if it has more errors with the hypothesis than without it. In a large step only
    the tokens of the first round are compared.
    """
    for stage in Stage:
        if not can_be_tried(found, stage):
            continue
        asked, _ = _rounds(found, stage)[0]
        try:
            with np.errstate(all="ignore"):
                residual = measure_of(found, stage, asked)(hypothesis.change)
        except Exception:  # an implementation with this fault could not have run this step
            return True
        if residual.wrong > residual.was:
            return True
    return False


def _tried(
    hypotheses: Iterable[Hypothesis], measure: Measure, rest: list[Measure], *, in_turn: bool
) -> list[Fit]:
    """Return the sorted fits of the hypotheses that explain some of the errors.

    `measure` compares the stage of the first broken rule, `rest` the other stages. With `in_turn`,
    one hypothesis runs at a time. A hypothesis that raises an exception is left out.
    """
    elsewhere = [other(_unchanged).wrong for other in rest]

    def fit(hypothesis: Hypothesis) -> Fit | None:
        try:
            with np.errstate(all="ignore"):
                residual = measure(hypothesis.change)
                if not _better(residual):
                    return None
                others = [other(hypothesis.change).wrong for other in rest]
        except Exception:  # a fault may not be applicable to the sizes or dtypes of a step
            return None
        worse = sum(max(now - was, 0) for now, was in zip(others, elsewhere, strict=True))
        return Fit(hypothesis, residual, worse)

    with ThreadPoolExecutor(1 if in_turn else os.cpu_count() or 1) as pool:
        found = [f for f in pool.map(fit, hypotheses) if f is not None]
    return sorted(found, key=lambda f: (f.order, f.hypothesis.name))


def _better(residual: Residual) -> bool:
    """Return whether there are fewer errors, or equally many that are clearly smaller."""
    if residual.wrong == residual.was:
        return residual.rms < _CLOSER * residual.was_rms
    return residual.wrong < residual.was


def _unchanged(oracle: Oracle) -> Oracle:
    return oracle


def _rounds(found: Examination, stage: Stage) -> list[tuple[NDArray[np.bool_] | None, int]]:
    """Return the tokens of each round, ``None`` for all, and the number of hypotheses in it.

    The number is not used while no hypothesis has explained an error: all are tried then, and in
    the first round always.
    """
    batch, right = found.step.batch, found.right
    if stage is not Stage.ATTENTION or batch is None or right is None:
        return [(None, 0)]
    pairs = keys_of_tokens(batch) * found.step.problem.dims.num_heads  # [T]
    if pairs.sum() <= MORE_PAIRS:
        return [(None, 0)]
    wrong = np.asarray(errors_of(found.step, right).wrong.any(axis=1))
    few, more = (_sample(pairs, wrong, budget) for budget in (FEW_PAIRS, MORE_PAIRS))
    return [(few, 0), (more, _KEPT), (None, 1)]


def _sample(pairs: NDArray[np.int64], wrong: NDArray[np.bool_], budget: int) -> NDArray[np.bool_]:
    """Return a random sample of tokens, three wrong ones for each right one.

    The sample ends when its tokens have at least `budget` pairs of a key and a head.
    """
    rng = np.random.default_rng(0)
    turns = [iter(rng.permutation(np.flatnonzero(w & (pairs > 0)))) for w in (wrong, ~wrong)]
    asked = np.zeros(len(pairs), bool)
    spent, turn = 0, 0
    while spent < budget:
        token = next(turns[turn % 4 == 3], None)
        turn += 1
        if token is None:
            if turn > 4 * len(pairs) + 8:  # both kinds of tokens are used up
                break
            continue
        asked[token] = True
        spent += int(pairs[token])
    return asked
