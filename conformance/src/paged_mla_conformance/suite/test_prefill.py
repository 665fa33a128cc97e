"""Attention over keys and values of every head, in one piece and in chunks (S-21)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.trial import Trial

pytestmark = pytest.mark.mla(group="prefill", ops=("prefill",))


def test_prefill(trial: Trial) -> None:
    trial.check_prefill()
