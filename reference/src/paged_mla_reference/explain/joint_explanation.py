"""Several dumps of one bug explained together: a cause must fit all of them.

What predicts the same of one step seldom does so of another. Single faults name rows and keys of
one step: they are searched for in each dump alone, and do not count here.
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
    """A known fault against several dumps.

    Parameters
    ----------
    hypothesis : Hypothesis
    left : tuple of float
        The share of what is wrong that stays wrong, of each dump, from 0 to 1. In a dump without a
        fault, 1 if the fault would have made one.
    rms : float
        Root mean square of the differences in the dumps that it fits, in budgets.
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
        """What stays wrong, and how far off; the same for what predicts the same."""
        return (round(sum(self.left), 6), round(self.rms, 3))

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key, as that of one dump's fits."""
        return order_of(self.hypothesis, *self.explains)


@dataclass(frozen=True)
class JointExplanation:
    """Several explained dumps.

    Parameters
    ----------
    explanations : list of Explanation
        Of each dump alone.
    fits : list of SharedFit
        Known faults, the best first.
    """

    explanations: list[Explanation]
    fits: list[SharedFit]

    @property
    def is_broken(self) -> bool:
        """Whether a rule is broken in any of them."""
        return any(explanation.is_broken for explanation in self.explanations)

    @property
    def best(self) -> list[SharedFit]:
        """The faults that fit all dumps, as well as the first one does; empty if none does."""
        return [f for f in self.fits if f.fits and f.explains == self.fits[0].explains]

    @property
    def cause(self) -> str:
        """What explains all of them, in a sentence; "" where nothing is broken."""
        count = len(self.explanations)
        if not self.is_broken:
            return ""
        if self.best:
            names = [fit.hypothesis.name for fit in self.best[1:]]
            others = f" So says of all: {', '.join(names[:_SHOWN])}." if names else ""
            return f"Matches all {count} dumps: {told(self.best[0].hypothesis)}{others}"
        if self.fits:
            nearest = self.fits[0]
            name, fitted = nearest.hypothesis.name, nearest.left.count(0.0)
            return f"Nothing known fits all {count} dumps. The nearest, {name}, fits {fitted}."
        return f"Nothing known fits any of the {count} dumps."

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as plain data; ``version`` tells its form."""
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
    """Look for what explains dumps that are explained already."""
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
    if not any(left):  # steps that went well take time: only what fits all others is tried on them
        left = [float(not e.is_broken and harms(e.found, hypothesis)) for e in explanations]
    squares = [f.residual.rms**2 for f in fits if f is not None and f.fits]
    rms = math.sqrt(sum(squares) / max(len(squares), 1))
    return SharedFit(hypothesis, tuple(left), rms)


def _left(explanation: Explanation, fit: Fit | None) -> float:
    """Return the share of what is wrong in a dump that a hypothesis leaves unexplained."""
    if not explanation.is_broken:
        return 0.0
    if fit is None:
        return 1.0
    return min((fit.residual.wrong + fit.elsewhere) / max(fit.residual.was, 1), 1.0)
