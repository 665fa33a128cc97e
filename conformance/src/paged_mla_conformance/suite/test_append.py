"""The cache after a write, byte by byte (S-10), in the format that the problem names (S-11)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="append", ops=("append",), rules=("S-10", "S-11"))


def test_append(trial: Trial) -> None:
    trial.check_append()
