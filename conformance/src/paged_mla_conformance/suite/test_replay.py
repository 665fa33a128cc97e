"""Several steps on one runner (S-17)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="replay", ops=("plan", "append", "attend"))


def test_replay(trial: Trial) -> None:
    trial.check_replay()


@pytest.mark.mla(group="replay", ops=("append", "attend"))
def test_another_runner(trial: Trial) -> None:
    """S-11, S-17: reads and writes of a runner of another problem do not affect this runner."""
    trial.check_beside()
