"""What FP8 caches give back: each code times its scale, rounded once."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from fp8_step import NAMES, build_fp8
from mla_step import P, R

from paged_mla_optimized import PagedMla
from paged_mla_optimized.kernels.common.scales import scaled


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_rows_are_what_the_cache_holds(name, dtype):
    """S-9, S-11: bit for bit, of every format, and nothing past the last key."""
    step = build_fp8(name, (33, 1), (0, 0), (5, 5), (70, 2), dtype=dtype)
    mla = PagedMla(step.config, "cpu")
    mla.plan(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=8)
    ckv, k_pe = torch.full((120, R), 7.0, dtype=dtype), torch.full((120, P), 7.0, dtype=dtype)
    mla.gather_context(step.cache, ckv, k_pe)
    keys = torch.from_numpy(torch.cat(step.keys).numpy().astype(ckv.numpy().dtype))
    assert torch.equal(ckv[:108], keys[:, :R])
    assert torch.equal(k_pe[:108], keys[:, R:])
    assert (ckv[108:] == 7).all()
    assert (k_pe[108:] == 7).all()


@triton.jit
def scaled_kernel(value_ptr, scale_ptr, out_ptr, N: tl.constexpr, DTYPE: tl.constexpr):
    at = tl.arange(0, N)
    value = scaled(tl.load(value_ptr + at), tl.load(scale_ptr + at), DTYPE)
    tl.store(out_ptr + at, value)


def test_products_are_rounded_once():
    """S-11: a float32 in between would put some products on a tie of float16 that are on none."""
    value = torch.tensor([9.0, 9.0, -9.0, 15.0, 1.0, 0.0, torch.nan, 448.0])
    scale = torch.tensor([1.0, 1 + 2**-23, 1.5, 0.1, 2**-20, 3.0, 1.0, 1e6])
    generator = np.random.default_rng(0)
    # Next to ties: odd multiples of half an ulp of float16, found by dividing.
    ties = (2 * generator.integers(1024, 2048, 56) + 1) / 2
    codes = generator.choice([9, 11, 13, 15, -7], 56).astype(np.float32)
    value = torch.cat([value, torch.from_numpy(codes)])
    scale = torch.cat([scale, torch.from_numpy((ties / np.abs(codes)).astype(np.float32))])
    out = torch.zeros(64, dtype=torch.float16)
    with np.errstate(over="ignore"):
        scaled_kernel[(1,)](value, scale, out, 64, tl.float16)
        exact = value.double().numpy() * scale.double().numpy()
        np.testing.assert_array_equal(out.numpy(), exact.astype(np.float16))
        assert (np.float32(exact).astype(np.float16) != exact.astype(np.float16)).sum() > 5
