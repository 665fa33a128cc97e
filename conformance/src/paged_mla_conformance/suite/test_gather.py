"""Reading cached latents back (S-1, S-9)."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_conformance.compare import Check
from paged_mla_conformance.trial import Trial
from paged_mla_reference.cache import gather_context

pytestmark = pytest.mark.mla(group="gather", ops=("gather_context",))


def test_gather(trial: Trial) -> None:
    [stage] = trial.stages()
    runner = trial.prepare()
    runner.load_cache(stage.after)
    actual = runner.gather_context(stage.batch)
    expected = gather_context(stage.problem, stage.batch, stage.after)
    for mine, theirs in zip(actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        assert mine.shape == theirs.shape
        assert np.array_equal(mine.view(np.uint8), theirs.view(np.uint8))
    trial.checks.append(Check("gathered bytes", 0.0, 0.0))
