"""Split attention over a paged latent cache (rules S-4 to S-7, S-9, S-20).

The grid has a fixed number of programs. A program owns a range of units (see ``schedule.py``), and
works on the segments of this range one after another. The query tiles of a group belong to
neighboring programs, which read the same keys at the same time. A program writes `out` and `lse`
of a group that is completely inside its range. For a group that the range cuts, it writes a float32
partial result, which ``combine.py`` joins with the others.

With FIXED_SPLITS each split of a group with several splits has a partial result. A program
processes a split from its last key tile to its first. If the range cuts a split, one program stores
the state of the split and the other continues from it (``split_handoff.py``). Otherwise no program
depends on another.

If keys have scales, the weight of a value is the weight of its score times the scale, and these
weights have a peak of their own. So the numbers that are rounded to 16 bits are at most 1 for all
scales.
"""

import triton
import triton.language as tl

from paged_mla_optimized.kernels.common.logarithms import LN_2, LOG2_E
from paged_mla_optimized.kernels.common.scales import has_key_scales
from paged_mla_optimized.kernels.common.schedule import (
    VARYING,
    Work,
    query_rows,
)
from paged_mla_optimized.kernels.common.segments import (
    Step,
    find_segment,
    partial_of_segment,
    program_work_range,
    tile_of_visit,
)
from paged_mla_optimized.kernels.common.split_handoff import (
    await_state,
    forget_state,
    leave_state,
    state_of_program,
)
from paged_mla_optimized.kernels.common.token_head import (
    Answers,
    Lines,
    Partials,
    line_at,
    line_ptr,
)
from paged_mla_optimized.kernels.portable.keys import (
    Keys,
    load_blocks,
    load_keys,
    load_shares,
    scores_of,
    share_width,
    store_shares,
    weighed,
)


@triton.jit
def _visible(step, segment, tile, index, token, live):
    """Return whether queries see the keys of a tile (S-4): bool, broadcasts to [TILE_M, TILE_N]."""
    key = (tile * step.TILE_N + tl.arange(0, step.TILE_N))[None, :]
    if step.MASK == "causal":
        visible = key <= segment.context_len + index[:, None]
    elif step.MASK == "non_causal":
        visible = key < segment.seq_len
    else:
        # One word of each line at a time: a gather of words would need a tile of shared memory.
        visible = key < segment.context_len
        node = tl.maximum(key - segment.context_len, 0)
        for word in tl.static_range(step.TREE_WORDS):
            at = step.tree_words_ptr + token * step.TREE_WORDS + word
            line = tl.load(at, mask=live, other=0)
            bit = (line[:, None] >> (node % 32)) & 1
            visible |= (node // 32 == word) & (bit != 0) & (key < segment.seq_len)
    return visible


@triton.jit
def _store_state(
    acc, peak, value_peak, total, answers, R: tl.constexpr, SHARES: tl.constexpr,
    TILE_M: tl.constexpr,
):  # fmt: skip
    """Store the state of a split; another program continues from it."""
    at = state_of_program(tl.program_id(0)).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    every = tl.full([TILE_M], True, tl.int1)
    store_shares(answers.partial_out_ptr + at * R, acc, every, R, SHARES)
    tl.store(answers.partial_lse_ptr + at, peak)
    tl.store(answers.partial_lse_ptr + at + TILE_M, total)
    tl.store(answers.partial_out_ptr + (at + TILE_M) * R, value_peak)


@triton.jit
def _load_state(source, answers, R: tl.constexpr, SHARES: tl.constexpr, TILE_M: tl.constexpr):
    """Return the sums, both peaks and the total weight that the program `source` stored."""
    at = state_of_program(source).to(tl.int64) * TILE_M + tl.arange(0, TILE_M)
    every = tl.full([TILE_M], True, tl.int1)
    acc = load_shares(answers.partial_out_ptr + at * R, every, R, SHARES)
    peak = tl.load(answers.partial_lse_ptr + at)
    total = tl.load(answers.partial_lse_ptr + at + TILE_M)
    return acc, peak, tl.load(answers.partial_out_ptr + (at + TILE_M) * R), total


# In Triton's interpreter ``inspect/taps.py`` can replace these two functions. Compiled kernels
# contain nothing of them.
@triton.jit
def tap_tile(token, head, live, tile, scores):
    """Pass the scores of a key tile [TILE_M, TILE_N] to a debugger.

    The scores are in units of log2, and -inf for keys that the query does not see.
    """


@triton.jit
def tap_part(token, head, live, peak, total, lse, out):
    """Pass the result over one part of a row's keys to a debugger.

    Each argument is [TILE_M]; `out` is a tuple of shares [TILE_M, ..].
    """


@triton.jit
def _attend(step, keys, q_nope, q_pe, answers, softmax_scale):
    """Compute the attention of every segment of this program, and store the results."""
    R: tl.constexpr = keys.R
    SCALES: tl.constexpr = keys.SCALES
    SHARES: tl.constexpr = keys.SHARES
    TILE_M: tl.constexpr = step.TILE_M
    unit, end, row = program_work_range(step)
    scale_log2 = softmax_scale * LOG2_E
    if SCALES == "scalar":
        layer_scale = tl.load(keys.scales_ptr)
        scale_log2 *= layer_scale
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        seq_len = segment.seq_len
        tile_begin = segment.tile_begin
        tile_end = segment.tile_end
        token, head, index, live = query_rows(step, row, segment.tile_m, step.num_heads, TILE_M)
        nope = load_shares(q_nope.ptr + line_at(q_nope, token, head), live, R, SHARES)
        pe_at = line_ptr(q_pe, token, head)[:, None] + tl.arange(0, keys.P)[None, :]
        pe = tl.load(pe_at, mask=live[:, None], other=0.0)

        acc = ()
        for _ in tl.static_range(SHARES):
            acc += (tl.zeros([TILE_M, share_width(R, SHARES)], tl.float32),)
        peak = tl.full([TILE_M], float("-inf"), tl.float32)
        value_peak = peak
        total = tl.zeros([TILE_M], tl.float32)
        if step.FIXED_SPLITS > 0:
            if segment.resumes:
                source, word_ptr = await_state(step, 0, step.FIXED_SPLITS)
                tl.debug_barrier()
                forget_state(word_ptr)
                acc, peak, value_peak, total = _load_state(source, answers, R, SHARES, TILE_M)
        table_row_ptr = keys.block_table_ptr + row.to(tl.int64) * keys.stride_table_row
        first = tile_of_visit(step, segment, tile_begin)
        block = load_blocks(keys, table_row_ptr, first, seq_len)
        for visit in range(tile_begin, tile_end):
            tile = tile_of_visit(step, segment, visit)
            ckv, k_pe, scales = load_keys(keys, block, tile, seq_len, pe.dtype)
            ahead = tile_of_visit(step, segment, visit + 1)
            block = load_blocks(keys, table_row_ptr, ahead, seq_len)
            scores = scores_of(nope, pe, ckv, k_pe, scales, scale_log2, SCALES, SHARES)
            if tile >= segment.tile_edge:
                visible = _visible(step, segment, tile, index, token, live)
                scores = tl.where(visible, scores, float("-inf"))
            tap_tile(token, head, live, tile, scores)
            # Online softmax in base 2; the keys are read once and are used again as values.
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
                    largest = tl.maximum(largest, 2.0**-126)  # ``weighed`` divides by it
                scores += tl.log2(largest)[None, :]
                new_value_peak = tl.maximum(value_peak, tl.max(scores, axis=1))
                shift = tl.where(new_value_peak == float("-inf"), 0.0, new_value_peak)
                weights = tl.exp2(scores - shift[:, None])
                keep = tl.exp2(value_peak - shift)
                value_peak = new_value_peak
            acc = weighed(acc, weights, ckv, scales, largest, keep, SCALES, SHARES)
            peak = new_peak

        is_empty = total == 0.0  # `peak` cannot decide this: a maximum ignores NaN
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
        if segment.suspends:
            _store_state(acc, peak, value_peak, total, answers, R, SHARES, TILE_M)
            tl.debug_barrier()
            leave_state(step, 0, step.FIXED_SPLITS)
        else:
            tap_part(token, head, live, peak, total, lse, out)
            if segment.is_whole:
                at = line_at(answers.out, token, head)
                store_shares(answers.out.ptr + at, out, live, R, SHARES)
                tl.store(line_ptr(answers.lse, token, head), lse, mask=live)
            else:
                partial = partial_of_segment(step, segment, step.FIXED_SPLITS).to(tl.int64)
                at = partial * TILE_M + tl.arange(0, TILE_M)
                kept = tl.full([TILE_M], True, tl.int1)
                if step.FIXED_SPLITS > 0:  # a lane without queries owns no partial query tile
                    kept = live
                store_shares(answers.partial_out_ptr + at * R, out, kept, R, SHARES)
                tl.store(answers.partial_lse_ptr + at, lse, mask=kept)
        unit = segment.next_unit


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["scales_ptr"])
def attend_kernel(
    work: Work,
    q_nope: Lines,  # [T, H, R]
    q_pe: Lines,  # [T, H, P]
    cache_ptr,  # [num_blocks, block_size, R + P], or uint8 [num_blocks, block_size, bytes of a row]
    stride_cache_block,
    stride_cache_token,
    scales_ptr,  # float32 [] or [num_blocks, 1, G]
    stride_scales_block,
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    num_blocks,
    block_size,
    num_heads,
    out: Lines,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    partials: Partials,
    softmax_scale,
    R: tl.constexpr,
    P: tl.constexpr,
    SCALES: tl.constexpr,  # where the scales are stored: a value of MlaConfig.scales
    SHARES: tl.constexpr,  # tensors that hold the latent columns of a tile
    NATIVE: tl.constexpr,
    MASK: tl.constexpr,
    TREE_WORDS: tl.constexpr,
    TILE_IN_BLOCK: tl.constexpr,  # block_size % TILE_N == 0
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    FIXED_SPLITS: tl.constexpr,  # most splits of a row; 0: the splits follow the grid's ranges
):
    _attend(
        Step(*work, num_heads, MASK, TREE_WORDS, TILE_M, TILE_N, FIXED_SPLITS),
        Keys(
            cache_ptr, stride_cache_block, stride_cache_token, scales_ptr, stride_scales_block,
            block_table_ptr, stride_table_row, stride_table_col, num_blocks, block_size, R, P,
            SCALES, SHARES, NATIVE, TILE_N, TILE_IN_BLOCK,
        ),
        q_nope, q_pe,
        Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials),
        softmax_scale,
    )  # fmt: skip
