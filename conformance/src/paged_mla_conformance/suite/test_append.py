"""The cache after a write, byte by byte (S-10)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.trial import Trial

pytestmark = pytest.mark.mla(group="append", ops=("append",))


def test_append(trial: Trial) -> None:
    trial.check_append()
