"""Chains and trees of drafts (S-3, S-4)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="verify", ops=("plan", "append", "attend"))


def test_verify(trial: Trial) -> None:
    trial.check_step()
