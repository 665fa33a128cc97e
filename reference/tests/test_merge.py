"""Merging partial results over disjoint keys."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_mla_reference.rules.merge import merge
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Output

EMPTY_NAN = (math.nan, -math.inf)


def _partial(*queries):
    """One query token per (out, lse), one head, width 1."""
    out = np.array([[[out]] for out, _ in queries], np.float32)
    return Output(out, np.array([[lse] for _, lse in queries], np.float32))


def _merged(*partials):
    answer = merge([_partial(partial) for partial in partials])
    return float(answer.out[0, 0, 0]), float(answer.lse[0, 0])


def test_equal_weights():
    """S-8: two partials of one lse give the mean, and ln 2 more."""
    out, lse = _merged((1.0, 5.0), (3.0, 5.0))
    assert out == 2.0
    assert lse == pytest.approx(5.0 + math.log(2))


def test_three_to_one():
    """S-8: weights are exp(lse), here 3 to 1."""
    out, lse = _merged((4.0, math.log(3)), (8.0, 0.0))
    assert (out, lse) == (pytest.approx(5.0), pytest.approx(math.log(4)))


@pytest.mark.parametrize("huge", [1e4, -1e4, 3e38])
def test_shifted_scores(huge):
    """S-8: weights depend on differences; no lse overflows or vanishes."""
    out, lse = _merged((1.0, huge), (3.0, huge))
    assert (out, lse) == (2.0, pytest.approx(huge + math.log(2)))


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e38])
def test_an_empty_partial_weighs_nothing(garbage):
    """S-8: for any out of an empty partial result, the other one is returned unchanged."""
    assert _merged((garbage, -math.inf), (3.0, 1.0)) == (3.0, 1.0)
    assert _merged((3.0, 1.0), (garbage, -math.inf)) == (3.0, 1.0)


def test_two_empties():
    """S-6, S-8: nothing and nothing is (0, -inf), not NaN."""
    assert _merged(EMPTY_NAN, EMPTY_NAN) == (0.0, -math.inf)


def test_empty_and_full_queries_side_by_side():
    """S-8: emptiness is decided query by query."""
    answer = merge([_partial((1.0, 0.0), EMPTY_NAN), _partial(EMPTY_NAN, (7.0, 2.0))])
    assert answer.out.ravel().tolist() == [1.0, 7.0]
    assert answer.lse.ravel().tolist() == [0.0, 2.0]


def test_merged_in_float32():
    """S-7, S-8: a merge is itself a partial."""
    answer = merge([_partial((1.0, 0.0))])
    assert (answer.out.dtype, answer.lse.dtype) == (np.float32, np.float32)


LSE = st.one_of(st.just(-math.inf), st.floats(-50, 50, width=32))
PARTS = st.lists(st.tuples(st.floats(-9, 9, width=32), LSE), min_size=2, max_size=6)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(parts=PARTS, data=st.data())
def test_order_and_grouping(parts, data):
    """S-8: any order, and any first group merged beforehand, up to float32 rounding."""
    expected = _merged(*parts)
    shuffled = data.draw(st.permutations(parts))
    cut = data.draw(st.integers(1, len(parts) - 1))
    grouped = _merged(_merged(*shuffled[:cut]), _merged(*shuffled[cut:]))
    assert _merged(*shuffled) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert grouped == pytest.approx(expected, rel=1e-5, abs=1e-4)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_lse_that_is_no_lse(bad):
    """S-8: +inf and NaN are refused; engines that mark empties so convert in their adapters."""
    with pytest.raises(InvalidArgument, match="lse"):
        _merged((1.0, bad), (2.0, 0.0))


@pytest.mark.parametrize(
    ("partials", "argument"),
    [
        ([], "partials"),
        ([_partial((1.0, 0.0)), _partial((1.0, 0.0), (1.0, 0.0))], "out"),
        ([Output(np.zeros((1, 1, 1)), np.zeros((1, 1), np.float32))], "out"),
        ([Output(np.zeros((1, 1, 1), np.float32), np.zeros((1, 2), np.float32))], "lse"),
        ([Output(np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))], "out"),
    ],
    ids=["none", "other-tokens", "float64", "other-heads", "two-axes"],
)
def test_partials_that_do_not_fit(partials, argument):
    """S-8: partials are float32 and of one shape."""
    with pytest.raises(InvalidArgument) as raised:
        merge(partials)
    assert raised.value.argument == argument
