"""Quantized queries of 8 bits: every code and every scale (S-11)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="queries", ops=("quantize_queries",))


def test_queries(trial: Trial) -> None:
    trial.check_queries()
