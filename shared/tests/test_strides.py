"""Arrays that are copied, written and read with the memory between their elements."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.strides import copied, is_spread, laid_out, memory_of


def test_a_copy_has_the_gaps():
    wide = np.arange(60.0).reshape(5, 12)
    view = wide[::2, 3:7]
    twin = copied(view)
    wide[...] = -1
    assert twin.strides == view.strides
    np.testing.assert_array_equal(twin, [[3, 4, 5, 6], [27, 28, 29, 30], [51, 52, 53, 54]])
    np.testing.assert_array_equal(memory_of(twin), np.arange(3, 55))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6),
        np.arange(6)[::-1],
        np.broadcast_to(np.arange(3), (4, 3)),
        np.zeros((0, 4))[:, ::2],
        np.zeros(10_000)[::1000],
        np.zeros(4, "i4,i8")["f1"],
    ],
    ids=["dense", "backwards", "overlapping", "empty", "far", "odd"],
)
def test_contiguous_and_unusual_arrays(array: np.ndarray):
    """A copy is contiguous."""
    assert not is_spread(array)
    np.testing.assert_array_equal(copied(array), array)
    np.testing.assert_array_equal(memory_of(array), array.ravel())


def test_a_step_that_is_never_taken():
    """An axis of one element may have any stride."""
    assert laid_out("x", np.arange(3.0), [1, 2], [2**62, 2]).tolist() == [[0, 2]]


@pytest.mark.parametrize(
    ("shape", "strides"),
    [([3], [4]), ([9], [0]), ([2], [-1]), ([2, 2], [1]), ([-1], [1]), ([0, 2**62], [1, 1])],
)
def test_bad_views(shape: list[int], strides: list[int]):
    """Views of 8 elements that exceed them, repeat them, run backwards, or are invalid."""
    with pytest.raises(InvalidArgument, match="x: got shape"):
        laid_out("x", np.zeros(8), shape, strides)
    with pytest.raises(InvalidArgument, match="x: got 99 axes"):
        laid_out("x", np.zeros(8), [1] * 99, [1] * 99)
