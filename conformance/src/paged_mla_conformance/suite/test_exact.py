"""Queries that see one value have it as their output; short rows have small errors (S-22)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="exact", ops=("attend",))


def test_exact(trial: Trial) -> None:
    trial.check_attention()
