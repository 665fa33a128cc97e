"""The result of one test, and the words for results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from paged_mla_conformance.suite.selection.traits import Traits

OUTCOMES = ("passed", "failed", "skipped", "expected-failure", "unexpected-pass")
FAILING = ("failed", "unexpected-pass")

FAILED = "failed"
FAILED_AS_EXPECTED = "failed (expected)"
NOT_SUPPORTED = "not supported"
SKIPPED = "skipped"
_SHOWN = {"expected-failure": FAILED_AS_EXPECTED, "unexpected-pass": FAILED}


def shown_outcome(outcome: str, reason: str) -> str:
    """Return the word for a result on the screen, on the HTML page and in the JUnit file.

    Parameters
    ----------
    outcome : str
        An outcome of the JSON report. There, "skipped" also means "not supported".
    reason : str
        The reason of the result. The reason of a test that is not supported names a capability
        that is not declared.

    Returns
    -------
    str
        "passed", "failed", "failed (expected)", "skipped" or "not supported".
    """
    if outcome == SKIPPED and "not declared" in reason:
        return NOT_SUPPORTED
    return _SHOWN.get(outcome, outcome)


def error_of(message: str) -> str:
    """Return the error line of a failure: the first line that pytest marks with "E".

    If no line is marked, the first line is returned. The note of the suite about an exception of
    the backend is appended.
    """
    lines = message.splitlines() or [""]
    errors = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    first, *rest = errors or lines[:1]
    return "; ".join([first, *(line for line in rest if line.startswith("backend raised"))])


@dataclass(frozen=True)
class Result:
    """The result of one test.

    Parameters
    ----------
    test : str
        The exact id, ``test_function[id]``.
    group : str
        The group of the test.
    rules : list of str
        The rules that the test checks.
    why : str
        The defect that the test guards against.
    outcome : {"passed", "failed", "skipped", "expected-failure", "unexpected-pass"}
        "skipped" includes tests that are not supported.
    replay : str
        The command that runs only this test.
    reason : str
        Why the test did not run, or why its failure is expected.
    undeclared_core : bool
        Whether the test is not supported because a core capability is not declared.
    message : str
        The failure with its traceback.
    note : str
        How the case was adapted to the backend; "" if it was not.
    end : {"returned", "died", "timed-out"}
        How the test ended: "died" if its process ended, "timed-out" if it exceeded the time limit.
    checks : list of dict
        ``what``, ``error`` and ``budget`` of each comparison that passed.
    ms : float
        How long the test took, in milliseconds.
    traits : dict
        Traits of the test (:mod:`paged_mla_conformance.suite.selection.traits`).
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
        """The largest error divided by its budget; ``None`` if the test compared nothing.

        A comparison with budget 0 is exact. It passed, so it counts as 0.
        """
        if not self.checks:
            return None
        return max((c["error"] / c["budget"] for c in self.checks if c["budget"]), default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """Return the entry of the test in the JSON report, without fields that have usual values.

        The entry of a test that passed is short. The entry of a test that failed or was expected
        to fail has everything that a reader needs to find out why.
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
        """Whether the result makes the backend not conformant."""
        return self.outcome in FAILING
