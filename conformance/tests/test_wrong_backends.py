"""The suite can fail: each wrong backend is caught, by the rule it breaks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from wrong_backends import (
    AcceptsAnything,
    Base2Lse,
    EmptyRowsAreNan,
    EmptyRowsAreStale,
    FutureSeen,
    LastTokenNotWritten,
    NanWeighs,
    PaddedTokensWriteSlot0,
    PageOrderIgnored,
    PositionsFromTheChunk,
    ShorterRows,
    SiblingsSeen,
    StaleLengths,
    TransposedLse,
    WrongBackend,
    wrong_scale,
)

from paged_mla_conformance.bad_inputs import BAD_BATCHES
from paged_mla_conformance.compare import Mismatch, check_merge
from paged_mla_conformance.profile import Run
from paged_mla_conformance.suite.test_errors import test_bad_batch as bad_batch_test
from paged_mla_conformance.trial import Trial
from paged_mla_reference.merge import merge
from paged_mla_shared.cases import GROUPS, MERGES
from paged_mla_shared.dims import SMALL

CAUGHT = [
    (Base2Lse, "decode-h16", "check_attention", "S-7"),
    (TransposedLse, "decode-h16", "check_attention", "S-7"),
    (ShorterRows, "decode-bs64", "check_attention", "S-5"),
    (PageOrderIgnored, "decode-sweep-bs16", "check_attention", "S-9"),
    (EmptyRowsAreNan, "empty-middle", "check_step", "S-6"),
    (EmptyRowsAreStale, "empty-middle", "check_step", "S-6"),
    (StaleLengths, "replay-longer", "check_replay", "S-5"),
    (PaddedTokensWriteSlot0, "append-padded-rows", "check_append", "S-10"),
    (LastTokenNotWritten, "append-bs64", "check_append", "S-10"),
    (PositionsFromTheChunk, "metadata-mixed", "check_metadata", "S-3"),
    (FutureSeen, "extend-fresh-q17", "check_attention", "S-5"),
    (SiblingsSeen, "verify-tree-n8", "check_step", "S-5"),
]


def trial(backend: WrongBackend, case_id: str) -> Trial:
    [case] = [c for group in GROUPS.values() for c in group if c.id == case_id]
    return Trial(backend, case, SMALL, "float32")


@pytest.mark.parametrize(
    ("wrap", "case_id", "check", "rule"), CAUGHT, ids=[c[0].__name__ for c in CAUGHT]
)
def test_a_wrong_backend_is_caught_by_its_rule(
    wrap: Callable[..., object], case_id: str, check: str, rule: str
):
    """The case passes on the reference and fails on the mutant, naming the rule."""
    getattr(trial(WrongBackend(), case_id), check)()
    with pytest.raises(Mismatch) as caught:
        getattr(trial(WrongBackend(wrap=wrap), case_id), check)()
    assert caught.value.rule == rule


def test_a_wrong_scale_is_caught():
    """S-5: (R + P) ** -0.5 is not the model's scale."""
    backend = WrongBackend(spoil_problem=wrong_scale)
    with pytest.raises(Mismatch):
        trial(backend, "decode-h16").check_attention()


def test_a_merge_that_multiplies_nan_by_zero_is_caught():
    """S-8: an empty partial weighs exactly 0 whatever its out holds."""
    [case] = [c for c in MERGES if c.name == "nan-left"]
    partials = case.build(5, 3, 32)
    backend = WrongBackend(wrap=NanWeighs)
    runner = trial(backend, "decode-h16").prepare()
    with pytest.raises(Mismatch, match="S-8"):
        check_merge(runner.merge(partials), merge(partials), partials)


def test_a_backend_that_refuses_nothing_is_caught():
    """Bad input that is swallowed is a failure."""
    run = Run(WrongBackend(wrap=AcceptsAnything), "wrong", "small")
    [bad] = [b for b in BAD_BATCHES if b.name == "lens-negative"]
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        bad_batch_test(run, bad)
