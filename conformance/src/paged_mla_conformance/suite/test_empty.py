"""Rows without keys or query tokens, and padded tokens (S-2, S-6)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="empty", ops=("plan", "append", "attend"))


def test_empty(trial: Trial) -> None:
    trial.check_step()
