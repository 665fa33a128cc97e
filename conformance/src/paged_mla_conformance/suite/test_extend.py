"""Prompts and continued chunks (S-2, S-4)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="extend", ops=("attend",))


def test_extend(trial: Trial) -> None:
    trial.check_attention()
