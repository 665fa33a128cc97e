"""Illegal steps access only the memory of their own rows (S-1, S-2, S-9, S-10)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.bounded import check_bounded
from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(
    group="bounded", ops=("plan", "append", "attend"), features=("bounded",)
)


def test_bounded(trial: Trial) -> None:
    """A backend checks the values of a step on the device and treats illegal rows as padding."""
    check_bounded(trial)
