"""Explain a dump: its findings in order, and the faults that explain the first broken rule."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from paged_mla_reference.explain.checks.dump_checks import examine
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.finding import Finding, State
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.explain.hypotheses.ranking import Fit, rank
from paged_mla_reference.explain.hypotheses.residual import can_be_tried
from paged_mla_reference.faults.reports import link
from paged_mla_shared.dump import Dump

VERSION = 1
_SHOWN = 5  # hypotheses
_NOTHING = "No hypothesis fits: neither a known fault nor a single fault that was tried."


@dataclass(frozen=True)
class Explanation:
    """An explained dump.

    Parameters
    ----------
    found : Examination
    fits : list of Fit
        Hypotheses that explain some of the errors, the best first.
    """

    found: Examination
    fits: list[Fit]

    @property
    def is_broken(self) -> bool:
        """Whether a rule is broken."""
        return self.found.first is not None

    @property
    def best(self) -> list[Fit]:
        """The hypotheses that explain all errors as well as the first; empty if none does."""
        return [f for f in self.fits if f.fits and f.explains == self.fits[0].explains]

    @property
    def verdict(self) -> str:
        """The first broken rule and its place, in one sentence; or that no rule is broken."""
        first = self.found.first
        if first is not None:
            return f"{first.rule} is broken in {first.what}: {first.detail}"
        undecided = [f.what for f in self.found.findings if f.state is State.UNDECIDED]
        if not undecided:
            return "No rule is broken."
        return f"No rule is broken in what the dump contains; undecided: {', '.join(undecided)}."

    @property
    def cause(self) -> str:
        """The hypothesis that explains the errors, in words; "" if no rule is broken."""
        first = self.found.first
        if first is None:
            return ""
        if not can_be_tried(self.found, first.stage):
            return "No hypothesis can be tried: fields are missing, or the rules forbid the inputs."
        if self.best:
            names = [fit.hypothesis.name for fit in self.best[1:]]
            others = f" Equally good for this dump: {', '.join(names[:_SHOWN])}." if names else ""
            return f"{_matches(self.best[0])}: {told(self.best[0].hypothesis)}{others}"
        if self.fits:
            nearest = self.fits[0]
            share = 1 - nearest.residual.wrong / max(nearest.residual.was, 1)
            name = nearest.hypothesis.name
            return f"{_NOTHING} The nearest hypothesis, {name}, explains {share:.0%} of the errors."
        return _NOTHING

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain data; ``version`` is the version of its format."""
        problem = self.found.step.dump.problem
        return {
            "version": VERSION,
            "origin": self.found.step.dump.origin,
            "problem": asdict(problem),
            "fields": sorted(self.found.step.dump.arrays),
            "broken": self.is_broken,
            "verdict": self.verdict,
            "cause": self.cause,
            "findings": [_finding(finding) for finding in self.found.findings],
            "hypotheses": [_fit(fit) for fit in self.fits[: 2 * _SHOWN]],
        }


def explain(dump: Dump) -> Explanation:
    """Check a dump, and search for hypotheses that explain the first rule that it breaks.

    Raises
    ------
    InvalidArgument
        The rules do not allow the dump's problem, or its fields contradict each other.
    """
    found = examine(Step.of(dump))
    return Explanation(found, rank(found))


def _matches(fit: Fit) -> str:
    if fit.residual.largest:
        return f"Matches your output to within {fit.residual.largest:.1g}"
    return "Matches every bit"


def told(hypothesis: Hypothesis) -> str:
    """Return a hypothesis in words, with the reports of it."""
    parts = [hypothesis.name]
    if hypothesis.known:
        parts.append(f" ({hypothesis.what.rstrip('.')})")
    if hypothesis.citations:
        parts.append(f", reported in {', '.join(hypothesis.citations)}")
    elif hypothesis.akin:
        parts.append(f", similar to {', '.join(hypothesis.akin)}")
    return "".join(parts) + "."


def _finding(finding: Finding) -> dict[str, Any]:
    return {**asdict(finding), "at": list(finding.at), "sentence": finding.sentence}


def _fit(fit: Fit) -> dict[str, Any]:
    return {
        **plain(fit.hypothesis),
        "fits": fit.fits,
        "still_wrong": fit.residual.wrong,
        "wrong_before": fit.residual.was,
        "wrong_elsewhere": fit.elsewhere,
        "largest_difference": fit.residual.largest,
    }


def plain(hypothesis: Hypothesis) -> dict[str, Any]:
    """Return a hypothesis as plain data."""
    cited = (*hypothesis.citations, *hypothesis.akin)
    return {
        "name": hypothesis.name,
        "what": hypothesis.what,
        "known": hypothesis.known,
        "rules": list(hypothesis.rules),
        "citations": list(hypothesis.citations),
        "akin": list(hypothesis.akin),
        "links": {citation: link(citation) for citation in cited},
    }
