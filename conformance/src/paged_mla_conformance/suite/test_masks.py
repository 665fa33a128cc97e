"""Tree masks in three forms, and steps that are not causal (S-4, S-14)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="masks", ops=("attend",))


def test_masks(trial: Trial) -> None:
    trial.check_attention()
