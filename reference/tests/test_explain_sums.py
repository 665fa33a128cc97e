"""Splits without keys, 16-bit sums and padded heads are distinguished from similar errors."""

from __future__ import annotations

from functools import partial

import pytest
from dumped import ROWS, case, dumped

from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.faults.kernel.denominators import summing_in
from paged_mla_reference.faults.kernel.empty_splits import (
    of_a_number,
    past_the_end,
    with_an_lse_of_0,
)
from paged_mla_reference.oracle import RIGHT
from paged_mla_shared.cases import Row

SPLITS = (
    "splits-past-a-row-have-an-lse-of-0",
    "empty-splits-are-merged",
    "splits-that-a-query-does-not-see-weigh-one-key",
)
SUMS = (
    "the-sum-of-weights-is-in-bfloat16",
    "the-sum-of-weights-is-in-float16",
    "lse-in-bfloat16",
    "lse-in-float16",
)
HEADS = (
    "query-heads-are-rounded-up-in-one-place",
    "query-heads-are-rounded-up-in-both-places",
    "query-heads-are-padded-and-read-unpadded",
    "second-halves-of-32-heads-repeat-the-first",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("fault", "rivals"),
    [(SPLITS[0], SPLITS), (SUMS[0], SUMS), *((name, HEADS) for name in HEADS[:3])],
)
def test_it_is_named_and_nothing_like_it(fault: str, rivals: tuple[str, ...], dtype: str):
    """S-5, S-7: it comes first, and what is like it does not fit."""
    found = explain(dumped(fault, dtype, case(num_heads=5)))
    assert found.best[0].hypothesis.name == fault
    fit = {one.hypothesis.name for one in found.fits if one.fits}
    assert fit.isdisjoint(set(rivals) - {fault})


def test_a_sum_in_float16_is_named():
    """S-7: in float32, whose budgets it exceeds."""
    assert explain(dumped(SUMS[1])).best[0].hypothesis.name == SUMS[1]


@pytest.mark.parametrize(
    ("oracle", "said"),
    [
        (
            with_an_lse_of_0(RIGHT, partial(past_the_end, 16)),
            "splits past a row's end, of 16 keys, have an lse of 0",
        ),
        (
            with_an_lse_of_0(RIGHT, partial(of_a_number, 16)),
            "splits without keys, of 16 in each row, have an lse of 0",
        ),
        (
            summing_in(RIGHT, "bfloat16", 16),
            "the sum of weights is rounded to bfloat16 after every 16 keys",
        ),
        (
            summing_in(RIGHT, "bfloat16", 1 << 62),
            "the sum of weights is rounded to bfloat16 once",
        ),
    ],
)
def test_other_lengths_are_found(oracle, said: str):
    """What the catalogue has for one length is fitted to others."""
    rows = (*ROWS, Row(300, 1))
    found = explain(dumped(oracle, of=case(rows)))
    assert said in [fit.hypothesis.name for fit in found.best]


@pytest.mark.parametrize("heads", [1, 2, 16])
@pytest.mark.parametrize("fault", HEADS[1:3])
def test_a_power_of_two_of_heads_is_right(fault: str, heads: int):
    """S-5: nothing is padded then."""
    assert explain(dumped(fault, of=case(num_heads=heads))).verdict == "No rule is broken."


def test_rows_of_one_length_have_no_such_splits():
    """S-20: nothing is broken where no row is shorter than another."""
    of = case((Row(40, 1), Row(40, 2)))
    assert explain(dumped(SPLITS[0], of=of)).verdict == "No rule is broken."
