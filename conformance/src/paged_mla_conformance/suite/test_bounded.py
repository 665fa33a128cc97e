"""Steps that no rule allows reach no memory but their own rows' (S-1, S-2, S-9, S-10)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.bounded import check_bounded
from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(
    group="bounded", ops=("plan", "append", "attend"), features=("bounded",)
)


def test_bounded(trial: Trial) -> None:
    """The values of a step are looked at on the device: rows that are none are padding."""
    check_bounded(trial)
