"""Split attention over e4m3 caches by 16-bit products on Hopper (rules S-4 to S-7).

Exact: products are of float16, which holds e4m3 values in full. As in ``decode_few.py`` operands
are swapped, ``S^T = K Q^T`` and ``O^T = V^T P^T``, and here the keys of both products come from
registers, so that nothing unpacked goes back to shared memory (``e4m3.py``). One warp copies key
tiles into a ring. Two warpgroups share each tile: the keys for scores, the columns for answers. Of
more than 64 pairs several programs take 64 each.

Queries are float16 as well, after a power of two for each pair that scores undo: bfloat16 has fewer
bits than float16 but a wider range. What is at least 2 ** -32 of a pair's largest component loses
no bit, and what is below 2 ** -39 is lost.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_mla_optimized.kernels.common.schedule import share_of_program
from paged_mla_optimized.kernels.hopper.common import (
    FLOOR,
    LAZY,
    LN_2,
    LOG2_E,
    arrivals,
    clear_tail,
    copy_tiles,
    find_segment,
    partial_pairs,
    query_pairs,
    raised,
    sees,
    thread_barrier,
)
from paged_mla_optimized.kernels.hopper.e4m3 import contracted, transposed

_WARPS = gl.constexpr(8)
_SMALLEST = gl.constexpr(2.0**-126)  # scores of a scale of zero are zero, and hidden ones -inf


@gluon.jit
def _load_queries(
    q_ptr, stride_token, stride_head, token, head, live, WIDTH: gl.constexpr, layout: gl.constexpr
):
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = token * stride_token + head * stride_head
    return gl.load(q_ptr + at[:, None] + column[None, :], mask=live[:, None], other=0.0)


@gluon.jit
def _store_queries(q, factor, buffer, FIRST: gl.constexpr):
    """Store queries as ``contracted`` orders their columns, in two halves."""
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    q = (q.to(gl.float32) * factor[:, None]).to(gl.float16)
    left, right = q.reshape([ROWS, WIDTH // 4, 2, 2]).permute((0, 1, 3, 2)).split()
    buffer.index(0).slice(FIRST, ROWS).store(left.reshape([ROWS, WIDTH // 2]))
    buffer.index(1).slice(FIRST, ROWS).store(right.reshape([ROWS, WIDTH // 2]))


@gluon.jit
def _stage_queries(
    q_nope_ptr, q_pe_ptr, q_nope, q_pe, scales, peaks, scale, stride_q_nope_token,
    stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, token_starts_ptr, row, tile_m,
    num_heads, R: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Stage a query tile, `scale` in `scales`, less each pair's factor, and the lowest `peaks`."""
    PAIRS: gl.constexpr = scales.shape[0]
    ROWS: gl.constexpr = min(PAIRS, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    for first in gl.static_range(0, PAIRS, ROWS):
        token, head, _, live = query_pairs(
            token_starts_ptr, row, tile_m * (PAIRS // ROWS) + first // ROWS, num_heads, ROWS,
            gl.SliceLayout(1, layout),
        )  # fmt: skip
        nope = _load_queries(
            q_nope_ptr, stride_q_nope_token, stride_q_nope_head, token, head, live, R, layout
        )
        pe = _load_queries(
            q_pe_ptr, stride_q_pe_token, stride_q_pe_head, token, head, live, P, layout
        )
        top = gl.maximum(
            gl.max(gl.abs(nope.to(gl.float32)), 1), gl.max(gl.abs(pe.to(gl.float32)), 1)
        )
        # The largest component goes to [2 ** 14, 2 ** 15), by at most 2 ** 64.
        power = gl.minimum(127 + 14 + 127 - (top.to(gl.int32, bitcast=True) >> 23), 127 + 64)
        factor = (power << 23).to(gl.float32, bitcast=True)
        _store_queries(nope, factor, q_nope, first)
        _store_queries(pe, factor, q_pe, first)
        lowered = ((254 - power) << 23).to(gl.float32, bitcast=True) * scale
        scales.slice(first, ROWS).store(gl.maximum(lowered, _SMALLEST))
        peaks.slice(first, ROWS).store(gl.full_like(lowered, FLOOR))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _own_sum(weights):
    """Add up what each thread holds of a pair's `weights` [keys, pairs]: half as many registers."""
    KEYS: gl.constexpr = weights.shape[0]
    PAIRS: gl.constexpr = weights.shape[1]
    return gl.sum(weights.reshape([KEYS // 16, 2, 8, PAIRS]), 1)


@gluon.jit
def _by_warp(scores):
    """Arrange scores [keys, pairs] as [warps, each warp's], which moves nothing."""
    KEYS: gl.constexpr = scores.shape[0]
    PAIRS: gl.constexpr = scores.shape[1]
    ALONG: gl.constexpr = min(_WARPS, KEYS // 16)
    ACROSS: gl.constexpr = _WARPS // ALONG
    scores = scores.reshape([ALONG, KEYS // ALONG, ACROSS, PAIRS // ACROSS]).permute((0, 2, 1, 3))
    return scores.reshape([_WARPS, KEYS * PAIRS // _WARPS])


@gluon.jit
def _attend_tiles(
    q_nope, q_pe, ckv, k_pe, weights_smem, scales, peaks, exceeds, ready, empty, tile_begin,
    tile_end, tile_edge, stage, phase, tile_m, row, seq_len, context_len, token_starts_ptr,
    tree_words_ptr, num_heads, R: gl.constexpr, MASK: gl.constexpr, TREE_WORDS: gl.constexpr,
    TILE_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, s_layout: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Attend the staged queries to key tiles.

    Returns
    -------
    even, uneven : [R / 2, pairs]
        Sums of weighted values, of the even and the uneven columns.
    total : [pairs]
        The sum of weights, which are relative to `peaks`.
    stage, phase : of the ring, past these tiles
    """
    PAIRS: gl.constexpr = weights_smem.shape[1]
    COLUMNS: gl.constexpr = 64 if PAIRS < 64 else 32  # pairs of columns at a time
    KEYS: gl.constexpr = 32 if PAIRS < 64 else 16
    s_operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    s_pair: gl.constexpr = gl.SliceLayout(0, s_layout)
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    everywhere: gl.constexpr = gl.BlockedLayout([_WARPS], [32], [_WARPS], [0])
    even = gl.zeros([R // 2, PAIRS], gl.float32, layout)
    uneven = gl.zeros([R // 2, PAIRS], gl.float32, layout)
    sums = _own_sum(gl.zeros([TILE_N, PAIRS], gl.float32, s_layout))  # [TILE_N / 16, 8, PAIRS]
    own_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    for tile in range(tile_begin, tile_end):
        mbarrier.wait(ready.index(stage), phase)
        keys = ckv.index(stage)
        # Seen to vary: else what products are told of the queries is kept, in scarce registers.
        zero = stage >> 8
        if BOX > 0 and tile * TILE_N + TILE_N > seq_len:  # e4m3 has a NaN, and 0 * NaN is one too
            clear_tail(keys, seq_len - tile * TILE_N, TILE_N, R // 2, _WARPS)
            fence_async_shared()
            thread_barrier()
        # Words are loaded a chunk before they are unpacked. Products read registers as they run:
        # those of the last two are kept until they are done.
        words = k_pe.index(stage).load(s_operand)
        following = keys.slice(0, COLUMNS, dim=1).load(s_operand)
        last_left, last_right = contracted(words)
        s = gl.zeros([TILE_N, PAIRS], gl.float32, s_layout)
        queries = q_pe.index(zero).permute((1, 0))
        s = warpgroup_mma(last_left, queries, s, use_acc=False, is_async=True)
        queries = q_pe.index(zero + 1).permute((1, 0))
        s = warpgroup_mma(last_right, queries, s, is_async=True)
        for first in gl.static_range(0, R // 2, COLUMNS):
            left, right = contracted(following)
            if first + COLUMNS < R // 2:
                following = keys.slice(first + COLUMNS, COLUMNS, dim=1).load(s_operand)
            queries = q_nope.index(zero).slice(first, COLUMNS, dim=1)
            s = warpgroup_mma(left, queries.permute((1, 0)), s, is_async=True)
            queries = q_nope.index(zero + 1).slice(first, COLUMNS, dim=1)
            s = warpgroup_mma(right, queries.permute((1, 0)), s, is_async=True)
            last_left, last_right = warpgroup_mma_wait(2, deps=[last_left, last_right])
            last_left = left
            last_right = right
        words = keys.slice(0, KEYS).permute((1, 0)).load(operand)
        s, last_left, last_right = warpgroup_mma_wait(0, deps=[s, last_left, last_right])
        if tile >= tile_edge:
            key = tile * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, s_layout))
            token, _, index, live = query_pairs(
                token_starts_ptr, row, tile_m, num_heads, PAIRS, s_pair
            )
            visible = sees(
                key[:, None], seq_len, context_len, index[None, :], token[None, :],
                live[None, :], tree_words_ptr, MASK, TREE_WORDS,
            )  # fmt: skip
            s = gl.where(visible, s, float("-inf"))
        scale = scales.load(s_pair)
        peak = peaks.load(s_pair)
        # Peaks rise seldom: that one must is seen on the way, and then the weights are made anew.
        power = s * scale[None, :] - peak[None, :]
        weights = gl.exp2(power)
        weights_smem.store(weights.to(gl.float16))
        high = _by_warp((power > LAZY).to(gl.int32))
        exceeds.store(gl.max(high, 1))
        fence_async_shared()
        thread_barrier()
        if gl.max(exceeds.load(everywhere), 0) > 0:
            new_peak = raised(peak, gl.max(s, 0) * scale)
            weights = gl.exp2(s * scale[None, :] - new_peak[None, :])
            keep = gl.exp2(peak - new_peak)
            sums = sums * gl.convert_layout(keep, own_layout)[None, None, :]
            weights_smem.store(weights.to(gl.float16))
            fence_async_shared()
            peaks.store(new_peak)
            keep = gl.convert_layout(keep, pair_layout)
            even = even * keep[None, :]
            uneven = uneven * keep[None, :]
            thread_barrier()
        sums += _own_sum(weights)
        for first in gl.static_range(0, TILE_N, KEYS):
            part = weights_smem.slice(first, KEYS)
            of_even, of_uneven = transposed(words)
            if first + KEYS < TILE_N:
                words = keys.slice(first + KEYS, KEYS).permute((1, 0)).load(operand)
            even = warpgroup_mma(of_even, part, even, is_async=True)
            uneven = warpgroup_mma(of_uneven, part, uneven, is_async=True)
            if first == 0:
                last_even = of_even
                last_uneven = of_uneven
            last_even, last_uneven = warpgroup_mma_wait(2, deps=[last_even, last_uneven])
            last_even = of_even
            last_uneven = of_uneven
        even, uneven, last_even, last_uneven = warpgroup_mma_wait(
            0, deps=[even, uneven, last_even, last_uneven]
        )
        mbarrier.arrive(empty.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)

    total = gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), pair_layout)
    return even, uneven, total, stage, phase


@gluon.jit
def _store_columns(even, uneven, factor, base_ptr, at, live, dtype: gl.constexpr):
    """Store answers, those of pair i at ``base_ptr + at[i]``."""
    out = gl.join(even * factor[None, :], uneven * factor[None, :])
    out = out.permute((0, 2, 1)).reshape([2 * even.shape[0], even.shape[1]])
    layout: gl.constexpr = out.type.layout
    column = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, layout))
    of_pair: gl.constexpr = gl.SliceLayout(0, layout)
    at = gl.convert_layout(at, of_pair)
    live = gl.convert_layout(live, of_pair)
    gl.store(base_ptr + at[None, :] + column[:, None], out.to(dtype), mask=live[None, :])


@gluon.jit
def _attend(
    q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, q_nope, q_pe, scales,
    ckv, k_pe, weights, peaks, exceeds, ready, empty, unit_starts_ptr, cut_ptr, shares_ptr,
    token_starts_ptr, row_lens_ptr, tree_words_ptr, cache_scale_ptr, stride_q_nope_token,
    stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_out_token, stride_out_head,
    stride_lse_token, stride_lse_head, softmax_scale, num_heads, R: gl.constexpr, P: gl.constexpr,
    MASK: gl.constexpr, TREE_WORDS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr,
    BOX: gl.constexpr, STAGES: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Attend the queries of every segment of this part to the tiles in the ring."""
    ALONG: gl.constexpr = min(_WARPS, TILE_N // 16)
    ACROSS: gl.constexpr = _WARPS // ALONG
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [ALONG, ACROSS], [16, TILE_M // ACROSS, 16]
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, TILE_M, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    cache_scale = gl.load(cache_scale_ptr)
    unit, end, row = share_of_program(shares_ptr)
    stage = 0
    phase = 0
    while unit < end:
        (
            following, place, is_whole, row, tile_m, seq_len, context_len, tile_begin, tile_end,
            tile_edge, _tile_stop,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, TILE_M, TILE_N, FIXED_SPLITS,
        )  # fmt: skip
        _stage_queries(
            q_nope_ptr, q_pe_ptr, q_nope, q_pe, scales, peaks, cache_scale * softmax_scale * LOG2_E,
            stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
            token_starts_ptr, row, tile_m, num_heads, R, P,
        )  # fmt: skip
        even, uneven, total, stage, phase = _attend_tiles(
            q_nope, q_pe, ckv, k_pe, weights, scales, peaks, exceeds, ready, empty, tile_begin,
            tile_end, tile_edge, stage, phase, tile_m, row, seq_len, context_len, token_starts_ptr,
            tree_words_ptr, num_heads, R, MASK, TREE_WORDS, TILE_N, BOX, STAGES, s_layout, layout,
        )  # fmt: skip
        is_empty = total == 0.0
        factor = gl.where(is_empty, 0.0, cache_scale / total)
        lse = (peaks.load(pair_layout) + gl.log2(total)) * LN_2
        lse = gl.where(is_empty, float("-inf"), lse)
        if is_whole:
            token, head, _, live = query_pairs(
                token_starts_ptr, row, tile_m, num_heads, TILE_M, pair_layout
            )
            at = token * stride_out_token + head * stride_out_head
            _store_columns(even, uneven, factor, out_ptr, at, live, out_ptr.dtype.element_ty)
            gl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)
        else:
            pair = partial_pairs(cut_ptr, shares_ptr, place, FIXED_SPLITS, TILE_M, pair_layout)
            _store_columns(even, uneven, factor, partial_out_ptr, pair * R, pair >= 0, gl.float32)
            gl.store(partial_lse_ptr + pair, lse)
        unit = following


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@gluon.jit(
    do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head"],
    do_not_specialize_on_alignment=["cache_scale_ptr"],
)
def decode_few_fp8_kernel(
    q_nope_ptr,  # [T, H, R]
    q_pe_ptr,  # [T, H, P]
    block_table_ptr,  # int32 [B, M]
    unit_starts_ptr,
    cut_ptr,
    shares_ptr,
    token_starts_ptr,
    row_lens_ptr,
    tree_words_ptr,  # int32 [T, TREE_WORDS]
    cache_ptr,  # read where no box fits: rows of R + P bytes
    cache_scale_ptr,  # float32, one for all
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    partial_out_ptr,  # float32 [tiles, TILE_M, R]
    partial_lse_ptr,  # float32 [tiles, TILE_M]
    ckv_desc,  # int16 [cache rows, (R + P) / 2], boxes [BOX, R / 2]
    k_pe_desc,  # the same, boxes [BOX, P / 2]
    stride_q_nope_token,
    stride_q_nope_head,
    stride_q_pe_token,
    stride_q_pe_head,
    stride_table_row,
    stride_table_col,
    stride_out_token,
    stride_out_head,
    stride_lse_token,
    stride_lse_head,
    softmax_scale,
    num_heads: gl.constexpr,
    block_size: gl.constexpr,
    block_rows: gl.constexpr,  # rows of the cache from one block to the next
    stride_cache_row: gl.constexpr,  # in pairs of bytes
    R: gl.constexpr,
    P: gl.constexpr,
    MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    BOX: gl.constexpr,  # keys of one copy; 0: four warps copy each by itself
    STAGES: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):
    cache_ptr = cache_ptr.to(gl.pointer_type(gl.int16))
    wide: gl.constexpr = ckv_desc.layout
    slim: gl.constexpr = k_pe_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, R // 2], wide)
    k_pe = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, P // 2], slim)
    q_nope = gl.allocate_shared_memory(gl.float16, [2, TILE_M, R // 2], wide)
    q_pe = gl.allocate_shared_memory(gl.float16, [2, TILE_M, P // 2], slim)
    weights = gl.allocate_shared_memory(
        gl.float16, [TILE_N, TILE_M], gl.NVMMASharedLayout(TILE_M * 2, 16, 2)
    )
    scales = gl.allocate_shared_memory(gl.float32, [TILE_M], flat)
    peaks = gl.allocate_shared_memory(gl.float32, [TILE_M], flat)
    exceeds = gl.allocate_shared_memory(gl.int32, [_WARPS], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=arrivals(BOX))
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gdc_wait()  # for what this step's earlier kernels wrote; launched before they end
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr,
                    q_nope, q_pe, scales, ckv, k_pe, weights, peaks, exceeds, ready, empty,
                    unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
                    tree_words_ptr, cache_scale_ptr, stride_q_nope_token, stride_q_nope_head,
                    stride_q_pe_token, stride_q_pe_head, stride_out_token, stride_out_head,
                    stride_lse_token, stride_lse_head, softmax_scale, num_heads, R, P, MASK,
                    TREE_WORDS, TILE_M, TILE_N, BOX, STAGES, FIXED_SPLITS,
                ),
            ),
            (
                copy_tiles,
                (
                    cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, ready, empty, block_table_ptr,
                    unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
                    stride_table_row, stride_table_col, num_heads, block_size, block_rows,
                    stride_cache_row, R // 2, MASK, TILE_M, TILE_N, BOX, STAGES,
                ),
            ),
        ],
        [4 if BOX == 0 else 1],
        [40 if BOX == 0 else 24],
    )  # fmt: skip
