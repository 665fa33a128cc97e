"""Merging of partial answers by their log-sum-exp (rule S-8)."""

import triton
import triton.language as tl


@triton.jit
def empty_sum(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the merge of no partial at all: accumulator, total weight and peak."""
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    return acc, total, peak


@triton.jit
def add_partial(acc, total, peak, out, lse):
    """Add `out` [ROWS, COLUMNS] with `lse` [ROWS]; -inf has weight 0 whatever `out` holds."""
    new_peak = tl.maximum(peak, lse)
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    keep = tl.exp(peak - shift)
    weight = tl.exp(lse - shift)
    out = tl.where((lse == float("-inf"))[:, None], 0.0, out)
    return acc * keep[:, None] + weight[:, None] * out, total * keep + weight, new_peak


@triton.jit
def close_sum(acc, total, peak):
    """Return ``out`` and natural-log ``lse`` of the sum; (0, -inf) when all were empty."""
    is_empty = total == 0.0  # not by the peak: a maximum leaves NaN out
    divisor = tl.where(is_empty, 1.0, total)
    return acc / divisor[:, None], tl.where(is_empty, peak, peak + tl.log(divisor))


@triton.jit(do_not_specialize=["num_pairs"])
def merge_kernel(
    outs_ptr,  # float32 [n, pairs, R]
    lses_ptr,  # float32 [n, pairs]
    out_ptr,  # float32 [pairs, R]
    lse_ptr,  # float32 [pairs]
    num_partials,
    num_pairs,  # (token, head) pairs
    width,  # R
    ROWS: tl.constexpr,
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
