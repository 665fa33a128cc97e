"""The lse of a sum of weights is as exact as float32 allows, also where peak and sum cancel."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.logarithms import LN_2, lse_of


@triton.jit
def _lse_kernel(peak_ptr, total_ptr, lse_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    lse = lse_of(tl.load(peak_ptr + index), tl.load(total_ptr + index))
    tl.store(lse_ptr + index, lse)


@triton.jit
def _rounded_twice_kernel(peak_ptr, total_ptr, lse_ptr, N: tl.constexpr):
    index = tl.arange(0, N)
    peak = tl.load(peak_ptr + index)
    tl.store(lse_ptr + index, (peak + tl.log2(tl.load(total_ptr + index))) * LN_2)


def launched(kernel, peak, total):
    """Return what a kernel makes of peaks and sums of weights, [N] each."""
    lse = torch.empty_like(peak)
    with np.errstate(all="ignore"):  # of Triton's interpreter, which computes with NumPy
        kernel[(1,)](peak, total, lse, len(peak))
    return lse


def cancelling(N=1024):
    """Return peaks [N] and sums [N] whose lse is between -1 and 1."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.randint(-40, 41, (N,), generator=generator).float()
    return -exponent, torch.exp2(exponent) * torch.exp2(2 * torch.rand(N, generator=generator) - 1)


def largest_error(lse, peak, total):
    """Return by how much lse [N] are off, over the spacing of float32 at ``|lse| + 1``."""
    exact = (peak.double() + total.double().log2()) * math.log(2)
    unit = 2.0 ** (torch.log2(exact.abs() + 1).floor() - 23)
    return ((lse.double() - exact).abs() / unit).max().item()


def test_the_error_is_that_of_the_result():
    """S-7: three roundings, of at most half a unit each; two roundings of large numbers are not."""
    peak, total = cancelling()
    assert largest_error(launched(_lse_kernel, peak, total), peak, total) <= 1.5
    assert largest_error(launched(_rounded_twice_kernel, peak, total), peak, total) > 4


@pytest.mark.parametrize("peak", [0.0, -7.25, 30.5, -1e30])
@pytest.mark.parametrize("total", [1.0, 1.5, 2.0**-130, 2.0**-149, 2.0**126, 1.9 * 2.0**127])
def test_peaks_and_sums_of_any_size(peak, total):
    """Subnormal numbers, and the largest ones, have a logarithm too."""
    peak, total = torch.full((16,), peak), torch.full((16,), total)
    assert largest_error(launched(_lse_kernel, peak, total), peak, total) <= 1.5


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_stays_nan(sign):
    """S-7: a NaN or infinite score makes the lse NaN, for both signs of the NaN."""
    total = torch.full((16,), math.copysign(math.nan, sign))
    assert launched(_lse_kernel, torch.zeros(16), total).isnan().all()
    negative = torch.full((16,), -1.0)
    assert launched(_lse_kernel, torch.zeros(16), negative).isnan().all()


def test_no_weight_and_too_large_ones():
    """A sum of 0 is minus infinity, and a sum that overflowed is infinity."""
    assert (launched(_lse_kernel, torch.zeros(16), torch.zeros(16)) == -math.inf).all()
    assert (launched(_lse_kernel, torch.zeros(16), torch.full((16,), math.inf)) == math.inf).all()
