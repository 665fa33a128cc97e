"""Explain several dumps of one bug together: a cause must fit all of them.

Two faults that predict the same output of one step seldom do so for another step. Single faults
name rows and keys of one step. They are searched for in each dump separately and are not used here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paged_mla_reference.explain.explanation import Explanation, plain, told
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.explain.hypotheses.ranking import Fit, harms, narrowest_first, order_of

VERSION = 1
_SHOWN = 5  # hypotheses


@dataclass(frozen=True)
class SharedFit:
    """A known fault compared with several dumps.

    Parameters
    ----------
    hypothesis : Hypothesis
    left : tuple of float
        For each dump, the share of its errors that the fault does not explain, from 0 to 1. For a
        dump without errors, 1 if the fault explains all dumps with errors but would have caused an
        error in this dump, otherwise 0.
    rms : float
        The root mean square, over the dumps that it fits, of the differences relative to their
        budgets.
    """

    hypothesis: Hypothesis
    left: tuple[float, ...]
    rms: float

    @property
    def fits(self) -> bool:
        """Whether it explains every dump."""
        return not any(self.left)

    @property
    def explains(self) -> tuple[float, ...]:
        """The unexplained share of errors, and the rms; equal for equal predictions."""
        return (round(sum(self.left), 6), round(self.rms, 3))

    @property
    def order(self) -> tuple[float, ...]:
        """The sort key, as for the fits of one dump (:func:`order_of`)."""
        return order_of(self.hypothesis, *self.explains)


@dataclass(frozen=True)
class JointExplanation:
    """Several explained dumps.

    Parameters
    ----------
    explanations : list of Explanation
        The explanation of each dump alone.
    fits : list of SharedFit
        Known faults, the best first.
    """

    explanations: list[Explanation]
    fits: list[SharedFit]

    @property
    def is_broken(self) -> bool:
        """Whether a rule is broken in any of the dumps."""
        return any(explanation.is_broken for explanation in self.explanations)

    @property
    def best(self) -> list[SharedFit]:
        """The faults that fit all dumps as well as the first one; empty if none does."""
        return [f for f in self.fits if f.fits and f.explains == self.fits[0].explains]

    @property
    def cause(self) -> str:
        """The fault that explains all dumps, in words; "" if no rule is broken in any."""
        count = len(self.explanations)
        if not self.is_broken:
            return ""
        if self.best:
            names = [fit.hypothesis.name for fit in self.best[1:]]
            others = f" Equally good for all: {', '.join(names[:_SHOWN])}." if names else ""
            return f"Matches all {count} dumps: {told(self.best[0].hypothesis)}{others}"
        if self.fits:
            nearest = self.fits[0]
            name, fitted = nearest.hypothesis.name, nearest.left.count(0.0)
            return (
                f"No known fault fits all {count} dumps. "
                f"The nearest fault, {name}, fits {fitted} of them."
            )
        return f"No known fault fits any of the {count} dumps."

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data; ``version`` is the version of its format."""
        return {
            "version": VERSION,
            "broken": self.is_broken,
            "cause": self.cause,
            "dumps": [explanation.as_dict() for explanation in self.explanations],
            "hypotheses": [
                {**plain(fit.hypothesis), "fits": fit.fits, "left": list(fit.left)}
                for fit in self.fits[: 2 * _SHOWN]
            ],
        }


def explain_jointly(explanations: Sequence[Explanation]) -> JointExplanation:
    """Search for the known faults that explain all of several dumps, from their explanations."""
    each = [{f.hypothesis.name: f for f in e.fits if f.hypothesis.known} for e in explanations]
    known = {name: fit.hypothesis for fits in each for name, fit in fits.items()}
    shared = [
        _shared(known[name], explanations, [fits.get(name) for fits in each]) for name in known
    ]
    shared.sort(key=lambda f: (f.order, f.hypothesis.name))
    return JointExplanation(list(explanations), narrowest_first(shared))


def _shared(
    hypothesis: Hypothesis, explanations: Sequence[Explanation], fits: Sequence[Fit | None]
) -> SharedFit:
    left = [_left(e, fit) for e, fit in zip(explanations, fits, strict=True)]
    if not any(left):  # dumps without errors are slow, so only faults that fit all others run here
        left = [float(not e.is_broken and harms(e.found, hypothesis)) for e in explanations]
    squares = [f.residual.rms**2 for f in fits if f is not None and f.fits]
    rms = math.sqrt(sum(squares) / max(len(squares), 1))
    return SharedFit(hypothesis, tuple(left), rms)


def _left(explanation: Explanation, fit: Fit | None) -> float:
    """Return the share of a dump's errors that a hypothesis does not explain, from 0 to 1."""
    if not explanation.is_broken:
        return 0.0
    if fit is None:
        return 1.0
    return min((fit.residual.wrong + fit.elsewhere) / max(fit.residual.was, 1), 1.0)
