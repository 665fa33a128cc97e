"""Schedules of a simulated engine: the output does not depend on the schedule (S-19)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.traces import TraceTrial

pytestmark = pytest.mark.mla(
    group="trace",
    ops=("plan", "append", "attend"),
    rules=("S-2", "S-3", "S-9", "S-10", "S-13", "S-15", "S-16", "S-18", "S-19"),
)


def test_trace(trace_trial: TraceTrial) -> None:
    """The output of a token equals the dense output of its request in every schedule."""
    assert trace_trial.check() > 0
