"""Rounding against every value a type has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_mla_reference.rules.rounding import round_to
from paged_mla_shared.dtypes import numpy_dtype


def _values(dtype):
    """Return every finite value of a 16-bit type, ascending, with its last bit."""
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):
        values = patterns.view(numpy_dtype(dtype)).astype(np.float64)
    finite = np.isfinite(values) & (patterns != 0x8000)  # one zero is enough
    order = np.argsort(values[finite])
    return values[finite][order], (patterns[finite] & 1)[order]


TABLES = {dtype: _values(dtype) for dtype in ("bfloat16", "float16")}


def _nearest(x, dtype):
    values, odd = TABLES[dtype]
    i = int(np.clip(np.searchsorted(values, x), 1, len(values) - 1))
    low, high = values[i - 1], values[i]
    if x - low == high - x:
        return low if odd[i] else high
    return low if x - low < high - x else high


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@settings(derandomize=True, deadline=None, max_examples=300)
@given(x=st.floats(-6e4, 6e4))
def test_nearest_even(dtype, x):
    """S-5: a rounding point is one rounding to nearest, ties to even."""
    assert float(round_to(np.array([x]), dtype)[0]) == _nearest(x, dtype)


def test_bfloat16_is_not_rounded_twice():
    """S-5: 1 + 2^-8 + 2^-40 is above the tie that rounding through float32 would see."""
    assert float(round_to(np.array([1 + 2**-8 + 2**-40]), "bfloat16")[0]) == 1 + 2**-7


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("off", [0, 0.25, 0.75, 1.25, -0.25, -0.75, -1.25], ids=str)
@pytest.mark.parametrize("tie", [1 + 2**-8, 1 + 3 * 2**-8, 1 + 5 * 2**-8], ids=str)
def test_bfloat16_around_ties(tie, off, sign):
    """S-5: ties go to even; a quarter of a float32 step away there is no tie."""
    x = sign * (tie + off * 2**-23)
    assert float(round_to(np.array([x]), "bfloat16")[0]) == _nearest(x, "bfloat16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_special_values(dtype):
    """S-6: infinities and NaN survive; too large a value becomes infinite."""
    rounded = round_to(np.array([np.inf, -np.inf, np.nan, 1e300]), dtype).astype(np.float64)
    assert rounded[[0, 1, 3]].tolist() == [np.inf, -np.inf, np.inf]
    assert np.isnan(rounded[2])
