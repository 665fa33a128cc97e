"""Strided memory, and invalid table entries after the blocks of a row (S-9)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="layouts", ops=("plan", "append", "attend"))


def test_layouts(trial: Trial) -> None:
    trial.check_step()
