"""Queries as e4m3 codes with a scale each, for kernels that multiply them in FP8."""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import encode
from paged_mla_optimized.kernels.common.scales import finite_magnitude, scale_of


@triton.jit
def _largest(x):
    """Return the largest finite magnitude of each line."""
    return tl.max(finite_magnitude(x), axis=1)


@triton.jit
def _codes(x, scale, NATIVE: tl.constexpr):
    """Return the codes of lines; what is infinite is not the largest number, but none."""
    finite = tl.abs(x) < float("inf")
    return encode(tl.where(finite, x / scale[:, None], float("nan")), NATIVE)


@triton.jit(do_not_specialize=["num_pairs"])
def quantise_kernel(
    q_nope_ptr,  # [T, H, R]
    q_pe_ptr,  # [T, H, P]
    codes_ptr,  # out uint8 [T, H, R + P], dense
    q_scale_ptr,  # out float32 [T, H], dense
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_pe_token,
    stride_q_pe_head,
    num_pairs,  # T * H
    num_heads,
    R: tl.constexpr,
    P: tl.constexpr,
    PAIRS: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,  # launched while the kernel before still runs
):
    if OVERLAP:  # the attend kernel waits for the end of this one alone, see ``rope.py``
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    live = pair < num_pairs
    mask = live[:, None]
    token = (pair // num_heads).to(tl.int64)
    head = (pair % num_heads).to(tl.int64)
    column, column_pe = tl.arange(0, R)[None, :], tl.arange(0, P)[None, :]
    at = q_nope_ptr + token * stride_q_nope_token + head * stride_q_nope_head
    at_pe = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
    nope = tl.load(at[:, None] + column, mask=mask, other=0.0).to(tl.float32)
    pe = tl.load(at_pe[:, None] + column_pe, mask=mask, other=0.0).to(tl.float32)
    scale = scale_of(tl.maximum(_largest(nope), _largest(pe)))
    target = codes_ptr + pair.to(tl.int64) * (R + P)
    tl.store(target[:, None] + column, _codes(nope, scale, NATIVE), mask=mask)
    tl.store(target[:, None] + R + column_pe, _codes(pe, scale, NATIVE), mask=mask)
    tl.store(q_scale_ptr + pair, scale, mask=live)
