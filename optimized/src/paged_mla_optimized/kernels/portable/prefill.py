"""Attention of whole prompts over keys and values of each head (rules S-4 to S-7).

A program of the grid works on one item: one query tile of one head (``common/prefill_plan.py``).
Within a group of heads, programs with lower numbers have tiles that see more keys. Programs past
the last item return at once. All heads share the part of the keys with position (`k_pe`). No
program depends on another.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.logarithms import LN_2, LOG2_E
from paged_mla_optimized.kernels.common.prefill_plan import find_item, load_tile, load_work


@triton.jit
def _load_lines(base_ptr, stride, exists, FIRST: tl.constexpr, WIDTH: tl.constexpr):
    """Load columns [FIRST, FIRST + WIDTH) of lines; lines that do not exist are zeros."""
    line = tl.arange(0, exists.shape[0]) * stride
    at = base_ptr + FIRST + line[:, None] + tl.arange(0, WIDTH)[None, :]
    return tl.load(at, mask=exists[:, None], other=0.0)


# Triton does not specialize on arguments that change from step to step, or with the slices that an
# engine takes of its buffers.
@triton.jit(do_not_specialize=["stride_lse_token", "stride_lse_head", "num_keys"])
def prefill_kernel(
    q_nope_ptr,  # [T, H, NOPE]
    q_pe_ptr,  # [T, H, ROPE]
    k_nope_ptr,  # [Tk, H, NOPE]
    k_pe_ptr,  # [Tk, ROPE]
    v_ptr,  # [Tk, H, V]
    tiles_ptr,  # int32 [tiles, TILE_WORDS] of the prefill plan
    work_ptr,  # int32 [WORK_WORDS] of the prefill plan
    out_ptr,  # [T, H, V]
    lse_ptr,  # float32 [T, H]
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_pe_token,
    stride_q_pe_head,
    stride_k_nope_token,
    stride_k_nope_head,
    stride_k_pe_token,
    stride_v_token,
    stride_v_head,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    softmax_scale,
    num_heads,
    num_keys,  # Tk
    NOPE: tl.constexpr,
    WIDE: tl.constexpr,  # largest power of two <= NOPE; NOPE - WIDE is a power of two too, or 0
    ROPE: tl.constexpr,
    V: tl.constexpr,
    CAUSAL: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    num_tiles, group_heads = load_work(work_ptr)
    tile, head32 = find_item(num_tiles, group_heads, tl.program_id(0), num_heads)
    if tile < 0:
        return
    token32, count, key_start, key_len, context = load_tile(tiles_ptr, tile, num_keys)
    head, token = head32.to(tl.int64), token32.to(tl.int64)
    index = tl.arange(0, TILE_M)
    live = index < count
    q_ptr = q_nope_ptr + token * stride_q_nope_token + head * stride_q_nope_head
    q_wide = _load_lines(q_ptr, stride_q_nope_token, live, 0, WIDE)
    if NOPE > WIDE:
        q_rest = _load_lines(q_ptr, stride_q_nope_token, live, WIDE, NOPE - WIDE)
    q_ptr = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
    q_pe = _load_lines(q_ptr, stride_q_pe_token, live, 0, ROPE)

    acc = tl.zeros([TILE_M, V], tl.float32)
    peak = tl.full([TILE_M], float("-inf"), tl.float32)
    total = tl.zeros([TILE_M], tl.float32)
    scale_log2 = softmax_scale * LOG2_E
    end, edge = key_len, key_len
    if CAUSAL:
        end, edge = tl.minimum(context + count, key_len), tl.minimum(context + 1, key_len)
    for key in range(0, end, TILE_N):
        first = (key_start + key).to(tl.int64)
        exists = key + tl.arange(0, TILE_N) < key_len
        k_ptr = k_nope_ptr + first * stride_k_nope_token + head * stride_k_nope_head
        k_wide = _load_lines(k_ptr, stride_k_nope_token, exists, 0, WIDE)
        scores = tl.dot(q_wide, tl.trans(k_wide), input_precision="ieee")
        if NOPE > WIDE:
            k_rest = _load_lines(k_ptr, stride_k_nope_token, exists, WIDE, NOPE - WIDE)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        k_ptr = k_pe_ptr + first * stride_k_pe_token
        k_pe = _load_lines(k_ptr, stride_k_pe_token, exists, 0, ROPE)
        scores = tl.dot(q_pe, tl.trans(k_pe), scores, input_precision="ieee") * scale_log2
        if key + TILE_N > edge:
            seen = (key + tl.arange(0, TILE_N))[None, :]
            if CAUSAL:
                scores = tl.where(seen <= context + index[:, None], scores, float("-inf"))
            else:
                scores = tl.where(seen < key_len, scores, float("-inf"))
        # Online softmax in base 2.
        new_peak = tl.maximum(peak, tl.max(scores, axis=1))
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        keep = tl.exp2(peak - shift)
        total = total * keep + tl.sum(weights, axis=1)
        value_ptr = v_ptr + first * stride_v_token + head * stride_v_head
        values = _load_lines(value_ptr, stride_v_token, exists, 0, V)
        weights = weights.to(values.dtype)
        acc = tl.dot(weights, values, acc * keep[:, None], input_precision="ieee")
        peak = new_peak

    is_empty = total == 0.0  # `peak` cannot decide this: a maximum ignores NaN
    divisor = tl.where(is_empty, 1.0, total)
    lse = tl.where(is_empty, peak, (peak + tl.log2(divisor)) * LN_2)
    line = (token + index) * stride_out_token + head * stride_out_head
    at = out_ptr + line[:, None] + tl.arange(0, V)[None, :]
    tl.store(at, (acc / divisor[:, None]).to(out_ptr.dtype.element_ty), mask=live[:, None])
    at = lse_ptr + (token + index) * stride_lse_token + head * stride_lse_head
    tl.store(at, lse, mask=live)
