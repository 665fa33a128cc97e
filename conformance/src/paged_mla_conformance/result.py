"""What became of one test."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

OUTCOMES = ("passed", "failed", "skipped", "expected-failure", "unexpected-pass")
FAILING = ("failed", "unexpected-pass")


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

    @property
    def fails(self) -> bool:
        """Whether it costs the verdict."""
        return self.outcome in FAILING
