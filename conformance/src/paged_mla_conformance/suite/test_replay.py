"""Steps after steps on one runner (S-17)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.trial import Trial

pytestmark = pytest.mark.mla(group="replay", ops=("plan", "append", "attend"))


def test_replay(trial: Trial) -> None:
    trial.check_replay()
