"""Gathering latents from the cache (S-1, S-9)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="gather", ops=("gather_context",))


def test_gather(trial: Trial) -> None:
    trial.check_read("gather_context")
