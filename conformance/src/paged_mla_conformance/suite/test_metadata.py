"""Positions and slots are exact (S-1, S-2, S-3)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="metadata", ops=("plan",))


def test_metadata(trial: Trial) -> None:
    trial.check_metadata()
