"""One query token per row (S-4, S-5, S-7)."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="decode", ops=("attend",))


def test_decode(trial: Trial) -> None:
    trial.check_attention()
