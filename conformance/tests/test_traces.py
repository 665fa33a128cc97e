"""Traces can fail: backends that are wrong between steps are caught, at a named step and token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from wrong_backends import (
    FutureSeen,
    PaddedTokensWriteSlot0,
    Passing,
    PositionsFromTheChunk,
    SiblingsSeen,
    StaleLengths,
    WrongBackend,
)

from paged_mla_conformance.traces import TraceCrash, TraceMismatch, TraceTrial
from paged_mla_reference.simulator.scenarios import CORE, core_scenario
from paged_mla_shared.dims import SMALL
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output


class OneTokenIsDecode(Passing):
    """In mixed steps, rows of one query token take the key range of the first such row."""

    def attend(self, batch: Batch) -> Output:
        single = np.flatnonzero(batch.query_lens == 1)
        if single.size < 2 or single.size == batch.num_rows:
            return self.inner.attend(batch)
        seq_lens = batch.seq_lens.copy()
        seq_lens[single] = np.minimum(seq_lens[single], seq_lens[single[0]])
        return self.inner.attend(replace(batch, seq_lens=seq_lens))


class RanksWriteEverything(Passing):
    """The owner of a token is not asked for."""

    def append(self, batch: Batch) -> None:
        if batch.slot_mapping is None:
            self.inner.append(batch)
            return
        derived = self.inner.plan(batch).slot_mapping
        _, first = np.unique(derived, return_index=True)
        slots = np.full_like(derived, -1)
        slots[first] = derived[first]
        self.inner.append(replace(batch, slot_mapping=slots))


class EqualRanks(Passing):
    """Ranks are averaged, whatever they saw."""

    def merge(self, partials: Sequence[Output]) -> Output:
        right = self.inner.merge(partials)
        out = np.mean([partial.out for partial in partials], axis=0, dtype=np.float32)
        return Output(out, right.lse)


class CacheStaysBehind(Passing):
    """The second cache that is loaded is not taken."""

    loaded = 0

    def load_cache(self, image: CacheImage) -> None:
        self.loaded += 1
        if self.loaded == 1:
            self.inner.load_cache(image)


class Crashing(Passing):
    """Divides by nothing."""

    def attend(self, batch: Batch) -> Output:
        raise ZeroDivisionError(batch.num_rows)


CAUGHT = [
    (FutureSeen, "chunks", "S-5"),
    (PositionsFromTheChunk, "chunks", "S-3"),
    (OneTokenIsDecode, "chunks", "S-5"),
    (StaleLengths, "preemption", "S-5"),
    (PaddedTokensWriteSlot0, "chains", "S-10"),
    (SiblingsSeen, "trees", "S-5"),
    (CacheStaysBehind, "trees", "S-10"),
    (RanksWriteEverything, "ranks", "S-10"),
    (EqualRanks, "ranks", "S-8"),
]


def trial(backend: WrongBackend, name: str) -> TraceTrial:
    return TraceTrial(backend, core_scenario(name), SMALL, "float32")


@pytest.mark.parametrize("scenario", CORE, ids=lambda scenario: scenario.name)
def test_the_reference_gives_the_dense_answers(scenario):
    """S-19: every step is within budget, and the tightest check of each kind is kept."""
    right = trial(WrongBackend(), scenario.name)
    assert right.check() > 8
    assert {"out", "lse", "positions", "slot_mapping"} <= {check.what for check in right.checks}


@pytest.mark.parametrize(
    ("wrap", "name", "rule"), CAUGHT, ids=[f"{c[0].__name__}-{c[1]}" for c in CAUGHT]
)
def test_a_wrong_backend_is_caught(wrap: Callable[..., object], name: str, rule: str):
    """S-19: an answer that depends on the schedule is found, with the rule it breaks."""
    with pytest.raises(TraceMismatch) as caught:
        trial(WrongBackend(wrap=wrap), name).check()
    assert caught.value.rule == rule
    assert f"trace {name}, step " in str(caught.value)


def test_a_crash_names_its_step():
    """S-19: an exception is a failure of one step, and no expected one."""
    with pytest.raises(TraceCrash, match="trace chunks, step 0, rank 0: ZeroDivisionError"):
        trial(WrongBackend(wrap=Crashing), "chunks").check()


def test_a_mismatch_names_step_and_token():
    """S-19: a person goes straight to the row that broke."""
    with pytest.raises(TraceMismatch, match=r"step \d+, rank 0, token \d+ \(prefill of .*index"):
        trial(WrongBackend(wrap=FutureSeen), "chunks").check()
