"""Split attention over a paged latent cache (rules S-4 to S-7, S-9).

A program owns a range of units (see ``schedule.py``) and walks the groups it touches. The query
tiles of a group are worked on by neighbouring programs, which read the same keys at the same time.
A group wholly inside the range is finished here; one that the range cuts leaves a float32 partial,
for ``combine.py``. With FIXED_SPLITS every split of a group that has several leaves one; a split is
taken from its last key tile to its first, and one that the range cuts is handed on as it is.

Where keys have scales, the weights of their values are those of the scores times the scale, and
have a peak of their own: what is rounded to 16 bits is at most 1, whatever the scales.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.handover import (
    await_state,
    forget_state,
    leave_state,
    state_of_program,
)
from paged_mla_optimized.kernels.common.logarithms import LN_2, LOG2_E
from paged_mla_optimized.kernels.common.opaque import opaque
from paged_mla_optimized.kernels.common.scales import has_key_scales
from paged_mla_optimized.kernels.common.schedule import (
    Work,
    query_rows,
    share_of_program,
    visited_tile,
)
from paged_mla_optimized.kernels.common.segments import Step, find_segment, partial_of_segment
from paged_mla_optimized.kernels.portable.keys import (
    load_blocks,
    load_keys,
    load_shares,
    scores_of,
    share_width,
    store_shares,
    weighed,
)


@triton.jit
def _visible(
    tile, seq_len, context_len, index, token, live, tree_words_ptr,
    TILE_N: tl.constexpr, MASK: tl.constexpr, TREE_WORDS: tl.constexpr,
):  # fmt: skip
    """Return which keys of a tile the queries see (S-4), bool broadcastable to [TILE_M, TILE_N]."""
    key = (tile * TILE_N + tl.arange(0, TILE_N))[None, :]
    if MASK == "causal":
        visible = key <= context_len + index[:, None]
    elif MASK == "non_causal":
        visible = key < seq_len
    else:
        # A word of each line at a time: a gather of words would take a tile of shared memory.
        visible = key < context_len
        node = tl.maximum(key - context_len, 0)
        for word in tl.static_range(TREE_WORDS):
            line = tl.load(tree_words_ptr + token * TREE_WORDS + word, mask=live, other=0)
            bit = (line[:, None] >> (node % 32)) & 1
            visible |= (node // 32 == word) & (bit != 0) & (key < seq_len)
    return visible


@triton.jit
def _store_state(
    acc, peak, value_peak, total, partial_out_ptr, partial_lse_ptr, R: tl.constexpr,
    SHARES: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Store what a split has come to so far, for another program to go on with."""
    at = state_of_program(tl.program_id(0)).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    every = tl.full([TILE_M], True, tl.int1)
    store_shares(partial_out_ptr + at * R, acc, every, R, SHARES)
    tl.store(partial_lse_ptr + at, peak)
    tl.store(partial_lse_ptr + at + TILE_M, total)
    tl.store(partial_out_ptr + (at + TILE_M) * R, value_peak)


@triton.jit
def _load_state(
    source, partial_out_ptr, partial_lse_ptr, R: tl.constexpr, SHARES: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """Load what the program `source` stored."""
    at = state_of_program(source).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    every = tl.full([TILE_M], True, tl.int1)
    acc = load_shares(partial_out_ptr + at * R, every, R, SHARES)
    peak = tl.load(partial_lse_ptr + at)
    total = tl.load(partial_lse_ptr + at + TILE_M)
    return acc, peak, tl.load(partial_out_ptr + (at + TILE_M) * R), total


# A debugger in Triton's interpreter stands in for these two (``inspect/taps.py``); nothing of them
# is compiled.
@triton.jit
def tap_tile(token, head, live, tile, scores):
    """Show the scores of a key tile [TILE_M, TILE_N], in units of log2, -inf if not seen."""


@triton.jit
def tap_part(token, head, live, peak, total, lse, out):
    """Show what a part of a row's keys came to: [TILE_M] each, and shares of out [TILE_M, ..]."""


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@triton.jit(
    do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head", "num_blocks"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def attend_kernel(
    q_nope_ptr,  # [T, H, R]
    q_pe_ptr,  # [T, H, P]
    cache_ptr,  # [num_blocks, block_size, R + P], or bytes
    scales_ptr,  # float32 [] or [num_blocks, 1, G]
    block_table_ptr,  # int32 [B, M]
    unit_starts_ptr,
    cut_ptr,
    shares_ptr,
    token_starts_ptr,
    row_lens_ptr,
    tree_words_ptr,  # int32 [T, TREE_WORDS]
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    partial_out_ptr,  # float32 [tiles, TILE_M, R]
    partial_lse_ptr,  # float32 [tiles, TILE_M]
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_pe_token,
    stride_q_pe_head,
    stride_cache_block,
    stride_cache_token,
    stride_scales_block,
    stride_table_row,
    stride_table_col,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    softmax_scale,
    num_heads,
    block_size,
    num_blocks,
    R: tl.constexpr,
    P: tl.constexpr,
    SCALES: tl.constexpr,  # where they lie, as MlaConfig.scales says
    SHARES: tl.constexpr,  # that a latent comes in
    NATIVE: tl.constexpr,
    MASK: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    TILE_IN_BLOCK: tl.constexpr,  # block_size % TILE_N == 0
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,  # most splits of a row; 0: the grid's ranges cut
):
    work = Work(unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr)
    unit, end, row = share_of_program(work, FIXED_SPLITS)
    scale_log2 = softmax_scale * LOG2_E
    if SCALES == "scalar":
        layer_scale = tl.load(scales_ptr)
        scale_log2 *= layer_scale
    while unit < end:
        segment = find_segment(
            Step(
                unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
                tree_words_ptr, num_heads, MASK, TREE_WORDS, TILE_M, TILE_N, FIXED_SPLITS,
            ),
            unit, end, row,
        )  # fmt: skip
        row = segment.row
        seq_len = segment.seq_len
        tile_begin = segment.tile_begin
        # Else LLVM finds the loop's tiles from what this was found from, a minimum of a difference,
        # and ptxas 12.8 makes a sum of that.
        tile_end = opaque(segment.tile_end)
        token, head, index, live = query_rows(work, row, segment.tile_m, num_heads, TILE_M)
        at = token * stride_q_nope_token + head * stride_q_nope_head
        q_nope = load_shares(q_nope_ptr + at, live, R, SHARES)
        q_pe_at = q_pe_ptr + token * stride_q_pe_token + head * stride_q_pe_head
        q_pe_at = q_pe_at[:, None] + tl.arange(0, P)[None, :]
        q_pe = tl.load(q_pe_at, mask=live[:, None], other=0.0)

        acc = ()
        for _ in tl.static_range(SHARES):
            acc += (tl.zeros([TILE_M, share_width(R, SHARES)], tl.float32),)
        peak = tl.full([TILE_M], float("-inf"), tl.float32)
        value_peak = peak
        total = tl.zeros([TILE_M], tl.float32)
        if FIXED_SPLITS > 0:
            if segment.is_taken:
                source, word_ptr = await_state(work, 0, FIXED_SPLITS)
                tl.debug_barrier()
                forget_state(word_ptr)
                acc, peak, value_peak, total = _load_state(
                    source, partial_out_ptr, partial_lse_ptr, R, SHARES, TILE_M
                )
        table_row_ptr = block_table_ptr + row.to(tl.int64) * stride_table_row
        block = load_blocks(
            table_row_ptr, stride_table_col,
            visited_tile(tile_begin, tile_begin, tile_end, FIXED_SPLITS),
            seq_len, block_size, num_blocks, TILE_N, TILE_IN_BLOCK,
        )  # fmt: skip
        for visit in range(tile_begin, tile_end):
            tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
            ckv, k_pe, scales = load_keys(
                cache_ptr, scales_ptr, block, stride_cache_block, stride_cache_token,
                stride_scales_block, tile, seq_len, block_size, R, P, q_pe.dtype, SCALES, SHARES,
                NATIVE, TILE_N, TILE_IN_BLOCK,
            )  # fmt: skip
            block = load_blocks(
                table_row_ptr, stride_table_col,
                visited_tile(visit + 1, tile_begin, tile_end, FIXED_SPLITS),
                seq_len, block_size, num_blocks, TILE_N, TILE_IN_BLOCK,
            )  # fmt: skip
            scores = scores_of(q_nope, q_pe, ckv, k_pe, scales, scale_log2, SCALES, SHARES)
            if tile >= segment.tile_edge:
                visible = _visible(
                    tile, seq_len, segment.context_len, index, token, live, tree_words_ptr,
                    TILE_N, MASK, TREE_WORDS,
                )  # fmt: skip
                scores = tl.where(visible, scores, float("-inf"))
            tap_tile(token, head, live, tile, scores)
            # Online softmax in base 2; the keys are read once and serve again as values.
            new_peak = tl.maximum(peak, tl.max(scores, axis=1))
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - shift[:, None])
            keep = tl.exp2(peak - shift)
            total = total * keep + tl.sum(weights, axis=1)
            largest = None
            if has_key_scales(SCALES):
                largest = scales[0]
                for share in tl.static_range(1, len(scales)):
                    largest = tl.maximum(largest, scales[share])
                if SCALES == "inline":
                    largest = tl.maximum(largest, 2.0**-126)  # 0 is no divisor of the others
                scores += tl.log2(largest)[None, :]
                new_value_peak = tl.maximum(value_peak, tl.max(scores, axis=1))
                shift = tl.where(new_value_peak == float("-inf"), 0.0, new_value_peak)
                weights = tl.exp2(scores - shift[:, None])
                keep = tl.exp2(value_peak - shift)
                value_peak = new_value_peak
            acc = weighed(acc, weights, ckv, scales, largest, keep, SCALES, SHARES)
            peak = new_peak

        is_empty = total == 0.0  # not by the peak: a maximum leaves NaN out
        divisor = tl.where(is_empty, 1.0, total)
        out = ()
        for share in tl.static_range(SHARES):
            mean = acc[share] / divisor[:, None]
            if SCALES == "scalar":
                mean *= layer_scale
            if has_key_scales(SCALES):
                mean *= tl.exp2(value_peak - tl.where(is_empty, 0.0, peak))[:, None]
            out += (mean,)
        lse = tl.where(is_empty, peak, (peak + tl.log2(divisor)) * LN_2)
        if segment.is_left:
            _store_state(
                acc, peak, value_peak, total, partial_out_ptr, partial_lse_ptr, R, SHARES, TILE_M
            )
            tl.debug_barrier()
            leave_state(work, 0, FIXED_SPLITS)
        else:
            tap_part(token, head, live, peak, total, lse, out)
            if segment.is_whole:
                at = token * stride_out_token + head * stride_out_head
                store_shares(out_ptr + at, out, live, R, SHARES)
                lse_at = lse_ptr + token * stride_lse_token + head * stride_lse_head
                tl.store(lse_at, lse, mask=live)
            else:
                partial = partial_of_segment(work, segment, FIXED_SPLITS).to(tl.int64)
                at = partial * TILE_M + tl.arange(0, TILE_M)
                kept = tl.full([TILE_M], True, tl.int1)
                if FIXED_SPLITS > 0:  # a lane without queries has no partials of its own
                    kept = live
                store_shares(partial_out_ptr + at * R, out, kept, R, SHARES)
                tl.store(partial_lse_ptr + at, lse, mask=kept)
        unit = segment.following
