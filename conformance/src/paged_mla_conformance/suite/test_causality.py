"""Changing later tokens does not change earlier outputs (S-4, S-19)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.suite.trials.trial import Trial

pytestmark = pytest.mark.mla(group="causality", ops=("append", "attend"))


def test_causality(trial: Trial) -> None:
    [stage] = trial.stages()
    later = np.concatenate([np.arange(n) >= (n + 1) // 2 for n in stage.batch.query_lens])
    changed = replace(
        stage.batch,
        ckv=np.where(later[:, None], -stage.batch.ckv, stage.batch.ckv),
        k_pe=np.where(later[:, None], -stage.batch.k_pe, stage.batch.k_pe),
    )
    trial.check_bits_kept(stage, changed, affected=later.tolist())
