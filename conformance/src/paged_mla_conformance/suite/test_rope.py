"""Rotation inside the step (S-12)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="rope", ops=("plan", "append", "attend"))


def test_rope(trial: Trial) -> None:
    trial.check_step()
