"""Only the descendants of a draft node see the node (S-4, S-14)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.rules.masks import decode_mask

pytestmark = pytest.mark.mla(group="siblings", ops=("append", "attend"))


def test_siblings(trial: Trial) -> None:
    [stage] = trial.stages()
    sees = decode_mask(stage.problem, stage.batch)[0]  # of row 0, whose tokens come first
    node = len(sees) // 2
    ckv, k_pe = stage.batch.ckv.copy(), stage.batch.k_pe.copy()
    ckv[node], k_pe[node] = -ckv[node], -k_pe[node]
    affected = [bool(line[node]) for line in sees]
    affected += [False] * (stage.batch.num_tokens - len(sees))
    trial.check_bits_kept(stage, replace(stage.batch, ckv=ckv, k_pe=k_pe), affected=affected)
