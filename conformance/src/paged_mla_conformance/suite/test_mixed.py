"""Whole steps with rows of every kind (S-2, S-3, S-4, S-6, S-10)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="mixed", ops=("plan", "append", "attend"))


def test_mixed(trial: Trial) -> None:
    trial.check_step()
