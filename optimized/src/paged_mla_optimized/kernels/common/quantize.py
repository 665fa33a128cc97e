"""Quantize queries to e4m3 codes with one scale each, for FP8 products (rule S-11).

A query is the R + P components of one pair of token and head. The kernel rotates the last P
components first if ROPE is not "none" (rule S-12). Each program of the grid quantizes PAIRS pairs.

With OVERLAP the programs wait for the end of the kernel before this one, and then permit the attend
kernel to start. The attend kernel waits for the end of this kernel before it reads the codes.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.e4m3 import encode
from paged_mla_optimized.kernels.common.rope import load_halves, store_halves
from paged_mla_optimized.kernels.common.scales import (
    largest_of,
    magnitude_of,
    quotient,
    scale_of,
)


@triton.jit
def _codes(x, scale, BOUNDED: tl.constexpr, NATIVE: tl.constexpr):
    """Return the codes of `x` / `scale`; infinities become NaN, not the largest number."""
    ratio = quotient(x, scale, NATIVE, BOUNDED)
    if not BOUNDED:
        ratio = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), ratio, float("nan"))
    return encode(ratio, NATIVE)


@triton.jit(do_not_specialize=["num_pairs"], do_not_specialize_on_alignment=["given_scale_ptr"])
def quantize_kernel(
    q_nope_ptr,  # [T, H, R]
    q_pe_ptr,  # [T, H, P]
    codes_ptr,  # out uint8 [T, H, R + P], dense
    q_scale_ptr,  # out float32 [T, H], dense
    given_scale_ptr,  # float32 []; read if IS_GIVEN
    positions_ptr,  # int64 [T], 0 for padding; read if ROPE is not "none"
    cos_ptr,  # [max_model_len, P / 2]
    sin_ptr,  # [max_model_len, P / 2]
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_pe_token,
    stride_q_pe_head,
    num_pairs,  # T * H
    num_heads,
    R: tl.constexpr,
    P: tl.constexpr,
    ROPE: tl.constexpr,  # "none", "interleaved" or "neox"
    IS_GIVEN: tl.constexpr,  # all queries have the given scale; otherwise each has its own scale
    PAIRS: tl.constexpr,  # pairs of a program
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,  # this kernel starts while the kernel before it still runs
):
    if OVERLAP:  # the attend kernel may then read keys at once, see ``rotate_kernel``
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    live = pair < num_pairs
    mask = live[:, None]
    token = (pair // num_heads).to(tl.int64)
    head = (pair % num_heads).to(tl.int64)
    column = tl.arange(0, R)[None, :]
    at = q_nope_ptr + token * stride_q_nope_token + head * stride_q_nope_head
    at_pe = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
    position = token  # unused without a rope
    if ROPE != "none":
        position = tl.load(positions_ptr + token, mask=live)
    nope = tl.load(at[:, None] + column, mask=mask, other=0.0)
    first, second = load_halves(at_pe, position, live, cos_ptr, sin_ptr, P, ROPE)
    if IS_GIVEN:
        scale = tl.full([PAIRS], 1.0, tl.float32) * tl.load(given_scale_ptr)
    else:
        of_nope, of_pe = largest_of(nope, first, second)
        scale = scale_of(magnitude_of(tl.maximum(of_nope, of_pe)))
    target = codes_ptr + pair.to(tl.int64) * (R + P)
    divisor = scale[:, None]
    BOUNDED: tl.constexpr = not IS_GIVEN
    tl.store(target[:, None] + column, _codes(nope, divisor, BOUNDED, NATIVE), mask=mask)
    first = _codes(first, divisor, BOUNDED, NATIVE)
    second = _codes(second, divisor, BOUNDED, NATIVE)
    store_halves(target + R, first, second, live, P, ROPE)
    tl.store(q_scale_ptr + pair, scale, mask=live)
