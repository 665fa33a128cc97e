"""Schedules of a simulated engine: whatever the schedule, one answer (S-19)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.traces import TraceTrial

pytestmark = pytest.mark.mla(
    group="trace",
    ops=("plan", "append", "attend"),
    rules=("S-2", "S-3", "S-9", "S-10", "S-13", "S-15", "S-16", "S-18", "S-19"),
)


def test_trace(trace_trial: TraceTrial) -> None:
    """A token's answer is the dense one of its request, however it was scheduled."""
    assert trace_trial.check() > 0
