"""e4m3 by its bits, which is what the interpreter and GPUs before sm89 run."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from ml_dtypes import bfloat16, float8_e4m3fn

from paged_mla_optimized.kernels.common.e4m3 import (
    bfloat16_bits,
    decode,
    encode,
    from_bfloat16_bits,
)

CODES = np.arange(256, dtype=np.uint8)
VALUES = CODES.view(float8_e4m3fn).astype(np.float64)


@triton.jit
def encode_kernel(x_ptr, codes_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(codes_ptr + at, encode(tl.load(x_ptr + at), NATIVE=False))


@triton.jit
def decode_kernel(codes_ptr, x_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(x_ptr + at, decode(tl.load(codes_ptr + at), x_ptr.dtype.element_ty, NATIVE=False))


@triton.jit
def bfloat16_kernel(x_ptr, bits_ptr, back_ptr, N: tl.constexpr):
    at = tl.arange(0, N)
    bits = bfloat16_bits(tl.load(x_ptr + at))
    tl.store(bits_ptr + at, bits)
    tl.store(back_ptr + at, from_bfloat16_bits(bits, back_ptr.dtype.element_ty))


def encoded(values):
    x = np.zeros(triton.next_power_of_2(len(values)), np.float32)
    x[: len(values)] = values
    codes = torch.zeros(len(x), dtype=torch.uint8)
    encode_kernel[(1,)](torch.from_numpy(x), codes, len(x))
    return codes.numpy()[: len(values)]


def nearest(values):
    """Return codes by looking for the nearest of all values, and the even one of two."""
    codes = []
    for value in np.float64(values):
        size = min(abs(value), 448.0)
        distance = np.abs(VALUES[:127] - size)
        near = np.flatnonzero(distance == distance.min())
        codes.append(near[near % 2 == 0][0] if len(near) > 1 else near[0])
    return np.array(codes, np.uint8) | (np.signbit(values) * 0x80).astype(np.uint8)


def test_every_code_comes_back():
    """S-11: each value has its own code, both zeros too."""
    numbers = ~np.isnan(VALUES)
    assert (encoded(VALUES[numbers]) == CODES[numbers]).all()


def test_between_codes():
    """S-11: to the nearest, ties to even, just off a tie, and what is too large becomes 448."""
    magnitudes = VALUES[:127]
    ties = np.float32((magnitudes[1:] + magnitudes[:-1]) / 2)
    bits = ties.view(np.int32)[:, None] + np.array([-1, 0, 1], np.int32)
    found = np.concatenate([bits.view(np.float32).ravel(), [464, 465, 1e38, np.inf, 1e-45]])
    found = np.concatenate([found, -found]).astype(np.float32)
    assert (encoded(found) == nearest(found)).all()


def test_random_values():
    """S-11: of all magnitudes around those that codes have."""
    generator = np.random.default_rng(0)
    exponents = generator.uniform(-14, 10, 4096)
    values = np.float32(generator.choice([-1, 1], 4096) * 2.0**exponents)
    assert (encoded(values) == nearest(values)).all()


def test_nan_has_one_code():
    """S-11: 0x7f, for any sign and payload."""
    patterns = np.array([0x7FC00000, 0x7F800001, 0xFFC00000, 0xFFFFFFFF], np.uint32)
    assert (encoded(patterns.view(np.float32)) == 0x7F).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_every_value_is_exact(dtype):
    """S-11: subnormal codes and NaN too, in each type that kernels compute in here."""
    values = torch.zeros(256, dtype=dtype)
    decode_kernel[(1,)](torch.from_numpy(CODES), values, 256)
    np.testing.assert_array_equal(values.double().numpy(), VALUES)
    assert (np.signbit(values.double().numpy()) == (CODES >= 0x80))[~np.isnan(VALUES)].all()


def test_bfloat16_rounds_to_even():
    """S-11: bits of the nearest bfloat16, and its value again."""
    x = np.random.default_rng(1).integers(0, 2**32, 2048, np.uint32).view(np.float32)
    x[:6] = np.float32([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, 0.0])
    bits, back = torch.zeros(2048, dtype=torch.int16), torch.zeros(2048)
    bfloat16_kernel[(1,)](torch.from_numpy(x), bits, back, 2048)
    with np.errstate(invalid="ignore"):  # signalling NaN
        expected = x.astype(bfloat16)
    np.testing.assert_array_equal(back.numpy(), expected.astype(np.float32))
    numbers = ~np.isnan(x)
    assert (bits.numpy().view(np.uint16) == expected.view(np.uint16))[numbers].all()
