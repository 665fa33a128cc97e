"""What became of one test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paged_mla_conformance.suite.selection.traits import Traits

OUTCOMES = ("passed", "failed", "skipped", "expected-failure", "unexpected-pass")
FAILING = ("failed", "unexpected-pass")


def error_of(message: str) -> str:
    """Return the line of a failure that says what is wrong: the first that pytest marks as error.

    A message without such a line is taken for its first line. What the suite notes of an exception
    of the backend stands behind it.
    """
    lines = message.splitlines() or [""]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    first, *rest = errors or lines[:1]
    return "; ".join([first, *(line for line in rest if line.startswith("backend raised"))])


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Parameters
    ----------
    test : str
        ``test_function[id]``, exact.
    group : str
    rules : list of str
    why : str
        What the case guards against.
    outcome : {"passed", "failed", "skipped", "expected-failure", "unexpected-pass"}
    replay : str
        Command that runs this test alone.
    reason : str
        Of a skip, or of an expected failure.
    undeclared_core : bool
        A skip that costs the verdict.
    message : str
        The failure.
    note : str
        What a reader should know beside the case, of any outcome.
    end : {"returned", "died", "timed-out"}
        How the process that asked came out of the test.
    checks : list of dict
        ``what``, ``error`` and ``budget`` of each comparison that held.
    ms : float
    traits : dict
        Of the situation that the test asks (:mod:`paged_mla_conformance.suite.selection.traits`).
    """

    test: str
    group: str
    rules: list[str]
    why: str
    outcome: str
    replay: str = ""
    reason: str = ""
    undeclared_core: bool = False
    message: str = ""
    note: str = ""
    end: str = "returned"
    checks: list[dict[str, Any]] = field(default_factory=list)
    ms: float = 0.0
    traits: Traits = field(default_factory=dict)

    @property
    def worst(self) -> float | None:
        """The largest error as a share of its budget; None where nothing was compared.

        A comparison without a budget is exact: it held, so its share is 0.
        """
        if not self.checks:
            return None
        return max((c["error"] / c["budget"] for c in self.checks if c["budget"]), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return what a report says of the test: what is usual is left out.

        A test that passed is one short line. One that failed, or was expected to, has everything
        that a reader needs to find out why.
        """
        said: dict[str, Any] = {"test": self.test, "group": self.group, "outcome": self.outcome}
        worst = self.worst
        if worst is not None:
            said["worst"] = float(f"{worst:.3g}")
        said["ms"] = round(self.ms, 1)
        if self.fails or self.outcome == "expected-failure":
            said |= {"rules": self.rules, "why": self.why, "checks": self.checks}
            said["replay"] = self.replay
        for name in ("reason", "undeclared_core", "message", "note"):
            if value := getattr(self, name):
                said[name] = value
        if self.end != "returned":
            said["end"] = self.end
        return said

    @property
    def fails(self) -> bool:
        """Whether it costs the verdict."""
        return self.outcome in FAILING
