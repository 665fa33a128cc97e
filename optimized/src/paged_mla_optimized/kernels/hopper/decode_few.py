"""Split attention for up to 32 query pairs a tile on Hopper, operands swapped (rules S-4 to S-7).

Scores and answers are computed transposed, ``S^T = K Q^T`` and ``O^T = V^T P^T``: the tensor cores'
64 rows are then keys and latent columns, and no row is wasted however few the queries. One warp
copies key tiles into a ring of shared memory; four others compute. Bound by memory bandwidth.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_mla_optimized.kernels.common.schedule import share_of_program, visited_tile
from paged_mla_optimized.kernels.hopper.common import (
    FLOOR,
    LN_2,
    LOG2_E,
    arrivals,
    clear_tail,
    copy_queries,
    copy_tiles,
    find_segment,
    partial_pairs,
    query_pairs,
    raised,
    sees,
    state_pairs,
    state_stored,
    taken_pairs,
)
from paged_mla_optimized.kernels.hopper.rope import stage_q_pe


@gluon.jit
def _store_state(
    acc, peak, sums, column, key_in_tile, partial_out_ptr, partial_lse_ptr, R: gl.constexpr
):
    """Store what a split has come to so far, for another program to go on with."""
    TILE_M: gl.constexpr = peak.shape[0]
    pair_layout: gl.constexpr = peak.type.layout
    pair = state_pairs(gl.program_id(0), TILE_M, pair_layout)
    _store_partial(acc, peak, column, pair, partial_out_ptr, partial_lse_ptr, R)
    sums_at = (pair + TILE_M)[None, :] * R + key_in_tile[:, None]
    gl.store(partial_out_ptr + sums_at, sums)


@gluon.jit
def _begin(
    is_taken, shares_ptr, column, key_in_tile, partial_out_ptr, partial_lse_ptr, R: gl.constexpr,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, FIXED_SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Return answers [R, TILE_M], peak [TILE_M] and sums [TILE_N, TILE_M] to add to."""
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    acc = gl.zeros([R, TILE_M], gl.float32, layout)
    peak = gl.full([TILE_M], FLOOR, gl.float32, pair_layout)
    sums = gl.zeros([TILE_N, TILE_M], gl.float32, layout)
    if FIXED_SPLITS > 0:
        if is_taken:
            pair = taken_pairs(shares_ptr, 0, FIXED_SPLITS, TILE_M, pair_layout)
            acc = gl.load(partial_out_ptr + pair[None, :] * R + column[:, None])
            peak = gl.load(partial_lse_ptr + pair)
            sums_at = (pair + TILE_M)[None, :] * R + key_in_tile[:, None]
            sums = gl.load(partial_out_ptr + sums_at)
    return acc, peak, sums


@gluon.jit
def _attend_tiles(
    acc, peak, sums, q_nope, q_pe, ckv, k_pe, weights_smem, ready, empty, tile_begin, tile_end,
    tile_edge, stage, phase, seq_len, context_len, key_in_tile, index, token, live, tree_words_ptr,
    scale, R: gl.constexpr, MASK: gl.constexpr, TREE_WORDS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Attend the staged queries to key tiles, and add to what ``_begin`` returned."""
    dtype: gl.constexpr = q_nope.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    for visit in range(tile_begin, tile_end):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        mbarrier.wait(ready.index(stage), phase)
        if BOX == 0:  # not copied by the engine that reads it next
            fence_async_shared()
        elif tile * TILE_N + TILE_N > seq_len:
            valid = seq_len - tile * TILE_N
            clear_tail(ckv.index(stage), valid, TILE_N, R, 4)
            fence_async_shared()
        zero = stage >> 8  # seems to vary, so that descriptors are found here and not hoisted
        queries = q_nope.index(zero).permute((1, 0))
        scores = gl.zeros([TILE_N, TILE_M], gl.float32, s_layout)
        scores = warpgroup_mma(ckv.index(stage), queries, scores, use_acc=False, is_async=True)
        queries = q_pe.index(zero).permute((1, 0))
        scores = warpgroup_mma(k_pe.index(stage), queries, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if tile >= tile_edge:
            key = tile * TILE_N + key_in_tile
            visible = sees(
                key[:, None], seq_len, context_len, index[None, :], token[None, :],
                live[None, :], tree_words_ptr, MASK, TREE_WORDS,
            )  # fmt: skip
            scores = gl.where(visible, scores, float("-inf"))
        new_peak = raised(peak, gl.max(scores, 0) * scale)
        weights = gl.exp2(scores * scale - new_peak[None, :])
        weights_smem.index(0).store(weights.to(dtype))
        fence_async_shared()
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        if gl.min(keep, 0) < 1.0:
            acc = acc * keep[None, :]
            sums = sums * keep[None, :]
        sums += weights
        values = ckv.index(stage).permute((1, 0))
        acc = warpgroup_mma(values, weights_smem.index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage))
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    return acc, peak, sums, stage, phase


@gluon.jit
def _answers(acc, peak, sums):
    """Return the answers [R, TILE_M] and their lse."""
    total = gl.sum(sums, 0)
    is_empty = total == 0.0
    out = acc * gl.where(is_empty, 0.0, 1.0 / total)[None, :]
    lse = gl.where(is_empty, float("-inf"), (peak + gl.log2(total)) * LN_2)
    return out, lse


@gluon.jit
def _store_answers(
    acc, peak, sums, column, is_whole, place, token, head, live, out_ptr, lse_ptr, partial_out_ptr,
    partial_lse_ptr, cut_ptr, shares_ptr, stride_out_token, stride_out_head, stride_lse_token,
    stride_lse_head, R: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Store the answers of a query tile, or keep them as the partial that `place` says."""
    TILE_M: gl.constexpr = peak.shape[0]
    pair_layout: gl.constexpr = peak.type.layout
    out, lse = _answers(acc, peak, sums)
    if is_whole:
        pairs = token * stride_out_token + head * stride_out_head
        out_at = out_ptr + pairs[None, :] + column[:, None]
        gl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[None, :])
        gl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)
    else:
        at = partial_pairs(cut_ptr, shares_ptr, place, FIXED_SPLITS, TILE_M, pair_layout)
        _store_partial(out, lse, column, at, partial_out_ptr, partial_lse_ptr, R)


@gluon.jit
def _store_partial(out, lse, column, at, partial_out_ptr, partial_lse_ptr, R: gl.constexpr):
    """Store the partial answers [R, TILE_M] of a query tile `at` their places."""
    gl.store(partial_out_ptr + at[None, :] * R + column[:, None], out)
    gl.store(partial_lse_ptr + at, lse)


@gluon.jit
def _attend(
    q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, q_nope, q_pe, ckv,
    k_pe, weights_smem, ready, empty, unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr,
    row_lens_ptr, tree_words_ptr, stride_q_nope_token, stride_q_nope_head, stride_q_pe_token,
    stride_q_pe_head, stride_out_token, stride_out_head, stride_lse_token, stride_lse_head,
    positions_ptr, cos_ptr, sin_ptr, softmax_scale, num_heads, R: gl.constexpr, MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, FIXED_SPLITS: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Attend the queries of every segment of this part to the tiles in the ring."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_M, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(0, s_layout)
    key_in_tile = gl.arange(0, TILE_N, layout=gl.SliceLayout(1, s_layout))
    column = gl.arange(0, R, layout=gl.SliceLayout(1, s_layout))
    scale = softmax_scale * LOG2_E

    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    stage = 0
    phase = 0
    while unit < end:
        (
            following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, context_len,
            tile_begin, tile_end, tile_edge,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, TILE_M, TILE_N, FIXED_SPLITS,
        )  # fmt: skip
        copy_queries(
            q_nope_ptr, stride_q_nope_token, stride_q_nope_head, token_starts_ptr, row, tile_m,
            num_heads, q_nope.index(0), TILE_M, 0, R,
        )  # fmt: skip
        stage_q_pe(
            q_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_q_pe_token, stride_q_pe_head,
            token_starts_ptr, row, tile_m, context_len, num_heads, q_pe.index(0), TILE_M, 64, MASK,
            ROPE,
        )  # fmt: skip
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        token, head, index, live = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, TILE_M, pair_layout
        )

        acc, peak, sums = _begin(
            is_taken, shares_ptr, column, key_in_tile, partial_out_ptr, partial_lse_ptr, R, TILE_M,
            TILE_N, FIXED_SPLITS, s_layout,
        )  # fmt: skip
        acc, peak, sums, stage, phase = _attend_tiles(
            acc, peak, sums, q_nope, q_pe, ckv, k_pe, weights_smem, ready, empty, tile_begin,
            tile_end, tile_edge, stage, phase, seq_len, context_len, key_in_tile, index, token,
            live, tree_words_ptr, scale, R, MASK, TREE_WORDS, TILE_M, TILE_N, BOX, STAGES,
            FIXED_SPLITS,
        )  # fmt: skip
        if FIXED_SPLITS == 0:  # decided early: a state that is never left does not compile
            _store_answers(
                acc, peak, sums, column, is_whole, place, token, head, live, out_ptr, lse_ptr,
                partial_out_ptr, partial_lse_ptr, cut_ptr, shares_ptr, stride_out_token,
                stride_out_head, stride_lse_token, stride_lse_head, R, FIXED_SPLITS,
            )  # fmt: skip
        elif is_left:
            _store_state(acc, peak, sums, column, key_in_tile, partial_out_ptr, partial_lse_ptr, R)
            state_stored(shares_ptr, 0, FIXED_SPLITS)
        else:
            _store_answers(
                acc, peak, sums, column, is_whole, place, token, head, live, out_ptr, lse_ptr,
                partial_out_ptr, partial_lse_ptr, cut_ptr, shares_ptr, stride_out_token,
                stride_out_head, stride_lse_token, stride_lse_head, R, FIXED_SPLITS,
            )  # fmt: skip
        unit = following


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@gluon.jit(do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head"])
def decode_few_kernel(
    q_nope_ptr,  # [T, H, R]
    q_pe_ptr,  # [T, H, 64]
    block_table_ptr,  # int32 [B, M]
    unit_starts_ptr,
    cut_ptr,
    shares_ptr,
    token_starts_ptr,
    row_lens_ptr,
    tree_words_ptr,  # int32 [T, TREE_WORDS]
    cache_ptr,  # read where no box fits: rows of R + 64
    out_ptr,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    partial_out_ptr,  # float32 [tiles, TILE_M, R]
    partial_lse_ptr,  # float32 [tiles, TILE_M]
    positions_ptr,  # int64 [T]; with a rope alone, as the tables
    cos_ptr,  # [max_model_len, 32]
    sin_ptr,
    ckv_desc,  # [cache rows, R + 64], boxes [BOX, R]
    k_pe_desc,  # the same, boxes [BOX, 64]
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
    stride_cache_row: gl.constexpr,
    R: gl.constexpr,
    MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr,
    TILE_M: gl.constexpr,
    TILE_N: gl.constexpr,
    BOX: gl.constexpr,  # keys of one copy; 0: four warps copy each by itself
    STAGES: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
):
    dtype: gl.constexpr = q_nope_ptr.dtype.element_ty
    rows_layout: gl.constexpr = ckv_desc.layout
    narrow: gl.constexpr = gl.NVMMASharedLayout(TILE_M * 2, 16, 2)
    q_nope = gl.allocate_shared_memory(dtype, [1, TILE_M, R], rows_layout)
    q_pe = gl.allocate_shared_memory(dtype, [1, TILE_M, 64], rows_layout)
    ckv = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, R], rows_layout)
    k_pe = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, 64], rows_layout)
    weights = gl.allocate_shared_memory(dtype, [1, TILE_N, TILE_M], narrow)
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
                    q_nope, q_pe, ckv, k_pe, weights, ready, empty, unit_starts_ptr, cut_ptr,
                    shares_ptr, token_starts_ptr, row_lens_ptr, tree_words_ptr, stride_q_nope_token,
                    stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_out_token,
                    stride_out_head, stride_lse_token, stride_lse_head, positions_ptr, cos_ptr,
                    sin_ptr, softmax_scale, num_heads, R, MASK, TREE_WORDS, TILE_M, TILE_N, BOX,
                    STAGES, FIXED_SPLITS, ROPE,
                ),
            ),
            (
                copy_tiles,
                (
                    cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, ready, empty, block_table_ptr,
                    unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
                    stride_table_row, stride_table_col, num_heads, block_size, block_rows,
                    stride_cache_row, R, MASK, TILE_M, TILE_N, BOX, STAGES, None, None, None,
                    "none", 0, FIXED_SPLITS,
                ),
            ),
        ],
        [4 if BOX == 0 else 1],
        [56],
    )  # fmt: skip
