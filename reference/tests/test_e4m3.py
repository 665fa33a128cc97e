"""The 8-bit type of the FP8 cache formats, held against hand-computed values and ml_dtypes."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from paged_mla_reference.rules.e4m3 import LARGEST, decode, encode

CODES = np.arange(256, dtype=np.uint8)
FINITE = np.arange(0x7F, dtype=np.uint8)  # codes of 0 to 448, in order


@pytest.mark.parametrize(
    ("code", "value"),
    [
        (0x00, 0.0),
        (0x01, 2.0**-9),
        (0x07, 7 * 2.0**-9),
        (0x08, 2.0**-6),
        (0x38, 1.0),
        (0x39, 1.125),
        (0x7E, 448.0),
        (0xB8, -1.0),
        (0xFE, -448.0),
    ],
)
def test_codes_by_hand(code, value):
    """S-11: both ways."""
    assert decode(np.array([code], np.uint8)).tolist() == [value]
    assert encode(np.array([value])).tolist() == [code]


def test_every_code_is_decoded_as_ml_dtypes_does():
    """S-11: all 256, signs of zeros too."""
    theirs = CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(decode(CODES), theirs)
    assert np.signbit(decode(CODES)).tolist() == np.signbit(theirs).tolist()
    assert np.flatnonzero(np.isnan(decode(CODES))).tolist() == [0x7F, 0xFF]


def test_every_value_has_its_code():
    """S-11: what was decoded comes back; the two NaN become one."""
    expected = np.where(CODES == 0xFF, 0x7F, CODES)
    assert encode(decode(CODES)).tolist() == expected.tolist()


def test_ties_go_to_the_even_code():
    """S-11: halfway between any two neighbours, and one float64 to either side of it."""
    values = decode(FINITE).astype(np.float64)
    halfway = (values[:-1] + values[1:]) / 2
    even = FINITE[:-1] + FINITE[:-1] % 2
    for sign, bit in ((1, 0), (-1, 0x80)):
        assert encode(sign * halfway).tolist() == (even | bit).tolist()
        assert encode(sign * np.nextafter(halfway, 0)).tolist() == (FINITE[:-1] | bit).tolist()
        assert encode(sign * np.nextafter(halfway, 1e3)).tolist() == (FINITE[1:] | bit).tolist()


@pytest.mark.parametrize("large", [448.0, 464.0, 464.1, 480.0, 1e30, np.inf])
def test_what_is_too_large_becomes_the_largest(large):
    """S-11: saturation, infinities included."""
    assert encode(np.array([large, -large])).tolist() == [0x7E, 0xFE]
    assert decode(np.array([0x7E], np.uint8)) == LARGEST


def test_zeros_keep_their_sign():
    """S-11: what rounds to zero too; 2^-10 is halfway to the least subnormal."""
    tiny = 2.0**-10
    assert encode(np.array([0.0, -0.0, tiny, -tiny])).tolist() == [0, 0x80, 0, 0x80]
    assert encode(np.nextafter([tiny, -tiny], [1, -1])).tolist() == [0x01, 0x81]


def test_every_nan_is_one_code():
    """S-11: with any sign and payload."""
    patterns = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF812345], np.uint32)
    assert encode(patterns.view(np.float32)).tolist() == [0x7F] * 4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_16_bit_pattern_is_encoded_as_ml_dtypes_does(dtype):
    """S-11: up to its largest value; past it ml_dtypes has NaN where the rule saturates."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        x = np.arange(2**16, dtype=np.uint16).view(dtype).astype(np.float32)
        theirs = np.clip(x, -LARGEST, LARGEST).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    theirs = np.where(np.isnan(x), 0x7F, theirs)
    assert encode(x).tolist() == theirs.tolist()
