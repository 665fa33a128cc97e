"""Cache formats with scales: what is written, what is read, what is written again (S-11)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.trial import Stage, Trial
from paged_mla_reference.cache import append
from paged_mla_shared.problem import Batch

pytestmark = pytest.mark.mla(group="formats", ops=("append", "attend"), rules=("S-10", "S-11"))


@pytest.mark.mla(group="formats", ops=("append",), rules=("S-10", "S-11"))
def test_written(trial: Trial) -> None:
    """S-10: every byte of rows and scales."""
    trial.check_append()


@pytest.mark.mla(group="formats", ops=("append",), rules=("S-10", "S-11"))
def test_written_again(trial: Trial) -> None:
    """S-10, S-11: drafts past the first of each row run again, as other tokens."""
    runner = trial.prepare()
    for stage in trial.stages():
        runner.load_cache(stage.before)
        runner.append(stage.batch)
        again = others_past_the_first(stage.batch)
        after = append(stage.problem, again, stage.after)
        trial.append(runner, Stage(stage.problem, again, stage.after, after))


def test_read(trial: Trial) -> None:
    """S-5: the answer is that of the bytes, whoever wrote them."""
    trial.check_attention()


@pytest.mark.mla(group="formats", ops=("gather_context",), rules=("S-11",))
def test_gathered(trial: Trial) -> None:
    """S-11: each value rounded to float32, then to the model's type."""
    trial.check_gather()


def others_past_the_first(batch: Batch) -> Batch:
    """Return a step whose rows of several tokens ran their first one before; all are doubled."""
    longer = batch.query_lens > 1
    first = batch.cu_seqlens_q[:-1][longer]
    arrays = {
        name: np.delete(getattr(batch, name), first, axis=0)
        for name in ("q_nope", "q_pe", "ckv", "k_pe")
    }
    arrays |= {name: arrays[name] + arrays[name] for name in ("ckv", "k_pe")}
    ends = np.cumsum(batch.query_lens - longer)
    return replace(batch, cu_seqlens_q=np.append(0, ends).astype(np.int32), **arrays)
