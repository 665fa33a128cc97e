"""Merge partial results by their lse (rule S-8).

A program of ``merge_kernel`` merges all n partial results of ROWS pairs of token and head. Other
merge kernels use the functions ``empty_sum``, ``add_partial`` and ``close_sum``.
"""

import triton
import triton.language as tl


@triton.jit
def empty_sum(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return accumulator, total weight and peak of a merge of no partial results."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return acc, total, peak


@triton.jit
def add_partial(acc, total, peak, out, lse):
    """Return accumulator, total weight and peak with one more partial result.

    The partial result is `out` [ROWS, COLUMNS] and `lse` [ROWS]. An `lse` of -inf has weight 0,
    even if `out` contains NaN.
    """
    new_peak = tl.maximum(peak, lse)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep = tl.exp(peak - shift)
    weight = tl.exp(lse - shift)
    out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
    return acc * keep[:, None] + weight[:, None] * out, total * keep + weight, new_peak


@triton.jit
def close_sum(acc, total, peak):
    """Return ``out`` and ``lse`` (natural logarithm) of a merge; (0, -inf) if all were empty."""
    is_empty = total == 0.0  # `peak` cannot decide this: a maximum ignores NaN
    divisor = tl.where(is_empty, 1.0, total)
    return acc / divisor[:, None], tl.where(is_empty, peak, peak + tl.log(divisor))


@triton.jit(do_not_specialize=["num_pairs"])
def merge_kernel(
    outs_ptr,  # float32 [n, pairs, R]
    lses_ptr,  # float32 [n, pairs]
    out_ptr,  # float32 [pairs, R]
    lse_ptr,  # float32 [pairs]
    num_partials,  # n
    num_pairs,  # (token, head) pairs
    width,  # R
    ROWS: tl.constexpr,  # pairs of a program
    COLUMNS: tl.constexpr,  # power of two >= R
):
    pair = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    is_pair = pair < num_pairs
    inside = is_pair[:, None] & (column < width)[None, :]
    at = pair[:, None] * width + column[None, :]
    acc, total, peak = empty_sum(ROWS, COLUMNS)
    for partial in range(num_partials):
        base = partial * num_pairs.to(tl.int64)
        lse = tl.load(lses_ptr + base + pair, mask=is_pair, other=float("-inf"))
        out = tl.load(outs_ptr + base * width + at, mask=inside, other=0.0)
        acc, total, peak = add_partial(acc, total, peak, out, lse)
    out, lse = close_sum(acc, total, peak)
    tl.store(out_ptr + at, out, mask=inside)
    tl.store(lse_ptr + pair, lse, mask=is_pair)
