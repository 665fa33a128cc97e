"""Strided memory and lying table tails (S-9)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="layouts", ops=("plan", "append", "attend"))


def test_layouts(trial: Trial) -> None:
    trial.check_step()
