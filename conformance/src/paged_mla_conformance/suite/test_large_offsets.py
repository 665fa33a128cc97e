"""Caches with offsets that need more than 31 and 32 bits (S-1)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="large_offsets", ops=("plan", "append", "attend"))


def test_large_offsets(trial: Trial) -> None:
    trial.check_step()
