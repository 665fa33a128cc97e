"""Split attention over e4m3 caches for few query pairs a tile on Hopper (rules S-4 to S-7).

Exact: products are of float16, which holds e4m3 values in full. As in ``decode_few.py`` operands
are swapped, ``S^T = K Q^T`` and ``O^T = V^T P^T``, and here the keys of both products come from
registers, so that nothing unpacked goes back to shared memory (``e4m3.py``). Two warpgroups share a
tile of keys: each scores half of the keys, and sums half of the latent columns. One warp copies.

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

from paged_mla_optimized.kernels.common.schedule import (
    fixed_partial,
    fixed_split,
    partial_of_program,
    share_of_program,
)
from paged_mla_optimized.kernels.hopper.common import (
    FLOOR,
    LN_2,
    LOG2_E,
    arrivals,
    clear_tail,
    copy_tiles,
    find_segment,
    query_pairs,
    raised,
    sees,
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
def _store_queries(q, factor, buffer):
    """Store queries as ``contracted`` orders their columns, in two halves."""
    ROWS: gl.constexpr = q.shape[0]
    WIDTH: gl.constexpr = q.shape[1]
    q = (q.to(gl.float32) * factor[:, None]).to(gl.float16)
    left, right = q.reshape([ROWS, WIDTH // 4, 2, 2]).permute((0, 1, 3, 2)).split()
    buffer.index(0).store(left.reshape([ROWS, WIDTH // 2]))
    buffer.index(1).store(right.reshape([ROWS, WIDTH // 2]))


@gluon.jit
def _stage_queries(
    q_nope_ptr, q_pe_ptr, q_nope, q_pe, stride_q_nope_token, stride_q_nope_head, stride_q_pe_token,
    stride_q_pe_head, token_starts_ptr, row, tile_m, num_heads, R: gl.constexpr, P: gl.constexpr,
    TILE_M: gl.constexpr, pair_layout: gl.constexpr,
):  # fmt: skip
    """Stage a query tile; return what undoes the factor of each pair."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [_WARPS, 1], [1, 0])
    token, head, _, live = query_pairs(
        token_starts_ptr, row, tile_m, num_heads, TILE_M, gl.SliceLayout(1, layout)
    )
    nope = _load_queries(
        q_nope_ptr, stride_q_nope_token, stride_q_nope_head, token, head, live, R, layout
    )
    pe = _load_queries(q_pe_ptr, stride_q_pe_token, stride_q_pe_head, token, head, live, P, layout)
    top = gl.maximum(gl.max(gl.abs(nope.to(gl.float32)), 1), gl.max(gl.abs(pe.to(gl.float32)), 1))
    # The largest component goes to [2 ** 14, 2 ** 15), by at most 2 ** 64.
    power = gl.minimum(127 + 14 + 127 - (top.to(gl.int32, bitcast=True) >> 23), 127 + 64)
    factor = (power << 23).to(gl.float32, bitcast=True)
    _store_queries(nope, factor, q_nope)
    _store_queries(pe, factor, q_pe)
    fence_async_shared()
    gl.thread_barrier()
    return gl.convert_layout(((254 - power) << 23).to(gl.float32, bitcast=True), pair_layout)


@gluon.jit
def _own_sum(weights):
    """Add up what each thread holds of a pair's `weights` [keys, pairs]: half as many registers."""
    KEYS: gl.constexpr = weights.shape[0]
    PAIRS: gl.constexpr = weights.shape[1]
    return gl.sum(weights.reshape([KEYS // 16, 2, 8, PAIRS]), 1)


@gluon.jit
def _attend_tiles(
    q_nope, q_pe, ckv, k_pe, weights_smem, ready, empty, tile_begin, tile_end, tile_edge, stage,
    phase, row, tile_m, seq_len, context_len, token_starts_ptr, tree_words_ptr, scale, cache_scale,
    num_heads, R: gl.constexpr, MASK: gl.constexpr, TREE_WORDS: gl.constexpr, TILE_M: gl.constexpr,
    TILE_N: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Attend the staged queries to key tiles; return the answers [R, TILE_M] and their lse."""
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    COLUMNS: gl.constexpr = 64  # of pairs of columns at a time, and keys
    KEYS: gl.constexpr = 32
    even = gl.zeros([R // 2, TILE_M], gl.float32, layout)
    uneven = gl.zeros([R // 2, TILE_M], gl.float32, layout)
    peak = gl.full([TILE_M], FLOOR, gl.float32, pair_layout)
    sums = _own_sum(gl.zeros([TILE_N, TILE_M], gl.float32, layout))  # [TILE_N / 16, 8, TILE_M]
    own_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    for tile in range(tile_begin, tile_end):
        mbarrier.wait(ready.index(stage), phase)
        keys = ckv.index(stage)
        if BOX > 0 and tile * TILE_N + TILE_N > seq_len:  # e4m3 has a NaN, and 0 * NaN is one too
            clear_tail(keys, seq_len - tile * TILE_N, TILE_N, R // 2, _WARPS)
            fence_async_shared()
        # Products read registers as they run: those of the last two are kept until they are done.
        last_left, last_right = contracted(k_pe.index(stage).load(operand))
        s = gl.zeros([TILE_N, TILE_M], gl.float32, layout)
        s = warpgroup_mma(last_left, q_pe.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(last_right, q_pe.index(1).permute((1, 0)), s, is_async=True)
        for first in gl.static_range(0, R // 2, COLUMNS):
            left, right = contracted(keys.slice(first, COLUMNS, dim=1).load(operand))
            queries = q_nope.index(0).slice(first, COLUMNS, dim=1)
            s = warpgroup_mma(left, queries.permute((1, 0)), s, is_async=True)
            queries = q_nope.index(1).slice(first, COLUMNS, dim=1)
            s = warpgroup_mma(right, queries.permute((1, 0)), s, is_async=True)
            last_left, last_right = warpgroup_mma_wait(2, deps=[last_left, last_right])
            last_left = left
            last_right = right
        s, last_left, last_right = warpgroup_mma_wait(0, deps=[s, last_left, last_right])
        if tile >= tile_edge:
            key = tile * TILE_N + gl.arange(0, TILE_N, layout=gl.SliceLayout(1, layout))
            token, _, index, live = query_pairs(
                token_starts_ptr, row, tile_m, num_heads, TILE_M, pair_layout
            )
            visible = sees(
                key[:, None], seq_len, context_len, index[None, :], token[None, :],
                live[None, :], tree_words_ptr, MASK, TREE_WORDS,
            )  # fmt: skip
            s = gl.where(visible, s, float("-inf"))
        new_peak = raised(peak, gl.max(s, 0) * scale)
        weights = gl.exp2(s * scale[None, :] - new_peak[None, :])
        weights_smem.store(weights.to(gl.float16))
        fence_async_shared()
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        if gl.min(keep, 0) < 1.0:
            even = even * keep[None, :]
            uneven = uneven * keep[None, :]
            sums = sums * gl.convert_layout(keep, own_layout)[None, None, :]
        sums += _own_sum(weights)
        gl.thread_barrier()
        last_even, last_uneven = transposed(keys.slice(0, KEYS).permute((1, 0)).load(operand))
        even = warpgroup_mma(last_even, weights_smem.slice(0, KEYS), even, is_async=True)
        uneven = warpgroup_mma(last_uneven, weights_smem.slice(0, KEYS), uneven, is_async=True)
        for first in gl.static_range(KEYS, TILE_N, KEYS):
            of_even, of_uneven = transposed(keys.slice(first, KEYS).permute((1, 0)).load(operand))
            part = weights_smem.slice(first, KEYS)
            even = warpgroup_mma(of_even, part, even, is_async=True)
            uneven = warpgroup_mma(of_uneven, part, uneven, is_async=True)
            last_even, last_uneven = warpgroup_mma_wait(2, deps=[last_even, last_uneven])
            last_even = of_even
            last_uneven = of_uneven
        mbarrier.arrive(empty.index(stage))  # all of it is in registers
        even, uneven, last_even, last_uneven = warpgroup_mma_wait(
            0, deps=[even, uneven, last_even, last_uneven]
        )
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)

    total = gl.convert_layout(gl.sum(gl.sum(sums, 0), 0), pair_layout)
    is_empty = total == 0.0
    factor = gl.where(is_empty, 0.0, cache_scale / total)
    lse = gl.where(is_empty, float("-inf"), (peak + gl.log2(total)) * LN_2)
    out = gl.join(even * factor[None, :], uneven * factor[None, :])
    return out.permute((0, 2, 1)).reshape([R, TILE_M]), lse, stage, phase


@gluon.jit
def _store_whole(
    out, lse, out_ptr, lse_ptr, token_starts_ptr, row, tile_m, stride_out_token, stride_out_head,
    stride_lse_token, stride_lse_head, num_heads,
):  # fmt: skip
    """Store the answers [R, TILE_M] of a query tile."""
    layout: gl.constexpr = out.type.layout
    token, head, _, live = query_pairs(
        token_starts_ptr, row, tile_m, num_heads, out.shape[1], gl.SliceLayout(0, layout)
    )
    column = gl.arange(0, out.shape[0], layout=gl.SliceLayout(1, layout))
    at = token * stride_out_token + head * stride_out_head
    out_at = out_ptr + at[None, :] + column[:, None]
    gl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=live[None, :])
    pair_layout: gl.constexpr = lse.type.layout
    token, head, _, live = query_pairs(
        token_starts_ptr, row, tile_m, num_heads, out.shape[1], pair_layout
    )
    gl.store(lse_ptr + token * stride_lse_token + head * stride_lse_head, lse, mask=live)


@gluon.jit
def _store_partial(out, lse, tile, partial_out_ptr, partial_lse_ptr):
    """Store the answers [R, TILE_M] of a query tile as partial `tile`."""
    R: gl.constexpr = out.shape[0]
    TILE_M: gl.constexpr = out.shape[1]
    layout: gl.constexpr = out.type.layout
    pair_layout: gl.constexpr = lse.type.layout
    pair = tile * TILE_M + gl.arange(0, TILE_M, layout=gl.SliceLayout(0, layout))
    column = gl.arange(0, R, layout=gl.SliceLayout(1, layout))
    gl.store(partial_out_ptr + pair[None, :] * R + column[:, None], out)
    gl.store(partial_lse_ptr + tile * TILE_M + gl.arange(0, TILE_M, layout=pair_layout), lse)


@gluon.jit
def _attend(
    q_nope_ptr, q_pe_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, q_nope, q_pe, ckv,
    k_pe, weights, ready, empty, unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr,
    row_lens_ptr, tree_words_ptr, cache_scale_ptr, stride_q_nope_token, stride_q_nope_head,
    stride_q_pe_token, stride_q_pe_head, stride_out_token, stride_out_head, stride_lse_token,
    stride_lse_head, softmax_scale, num_heads, R: gl.constexpr, P: gl.constexpr, MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr, TILE_M: gl.constexpr, TILE_N: gl.constexpr, BOX: gl.constexpr,
    STAGES: gl.constexpr, MIN_UNITS: gl.constexpr, SPLIT_TILES: gl.constexpr,
    ROW_SHARE: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Attend the queries of every segment of this part to the tiles in the ring."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, TILE_M, 16])
    cache_scale = gl.load(cache_scale_ptr)
    unit, end, row = share_of_program(shares_ptr)
    stage = 0
    phase = 0
    while unit < end:
        (
            following, is_head, is_whole, row, tile_m, seq_len, context_len, tile_begin, tile_end,
            tile_edge, tile_stop,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, TILE_M, TILE_N,
        )  # fmt: skip
        lowered = _stage_queries(
            q_nope_ptr, q_pe_ptr, q_nope, q_pe, stride_q_nope_token, stride_q_nope_head,
            stride_q_pe_token, stride_q_pe_head, token_starts_ptr, row, tile_m, num_heads, R, P,
            TILE_M, gl.SliceLayout(0, layout),
        )  # fmt: skip
        scale = gl.maximum(lowered * (cache_scale * softmax_scale * LOG2_E), _SMALLEST)

        length = tile_stop - tile_begin
        if FIXED_SPLITS > 0:
            _, splits, length = fixed_split(
                token_starts_ptr, row_lens_ptr, row, num_heads, TILE_M, TILE_N, MIN_UNITS,
                SPLIT_TILES, ROW_SHARE, FIXED_SPLITS,
            )  # fmt: skip
            is_whole = splits == 1
        for begin in range(tile_begin, tile_stop, length):
            out, lse, stage, phase = _attend_tiles(
                q_nope, q_pe, ckv, k_pe, weights, ready, empty, begin,
                gl.minimum(begin + length, tile_end), tile_edge, stage, phase, row, tile_m, seq_len,
                context_len, token_starts_ptr, tree_words_ptr, scale, cache_scale, num_heads, R,
                MASK, TREE_WORDS, TILE_M, TILE_N, BOX, STAGES, layout,
            )  # fmt: skip
            if is_whole:
                _store_whole(
                    out, lse, out_ptr, lse_ptr, token_starts_ptr, row, tile_m, stride_out_token,
                    stride_out_head, stride_lse_token, stride_lse_head, num_heads,
                )  # fmt: skip
            else:
                if FIXED_SPLITS > 0:
                    partial = fixed_partial(row, tile_m, splits, begin // length, FIXED_SPLITS)
                else:
                    partial = partial_of_program(cut_ptr, shares_ptr, is_head)
                _store_partial(out, lse, partial, partial_out_ptr, partial_lse_ptr)
        unit = following


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@gluon.jit(do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head"])
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
    MIN_UNITS: gl.constexpr,
    SPLIT_TILES: gl.constexpr,
    ROW_SHARE: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):
    cache_ptr = cache_ptr.to(gl.pointer_type(gl.int16))
    wide: gl.constexpr = ckv_desc.layout
    slim: gl.constexpr = k_pe_desc.layout
    narrow: gl.constexpr = gl.NVMMASharedLayout(TILE_M * 2, 16, 2)
    ckv = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, R // 2], wide)
    k_pe = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, P // 2], slim)
    q_nope = gl.allocate_shared_memory(gl.float16, [2, TILE_M, R // 2], wide)
    q_pe = gl.allocate_shared_memory(gl.float16, [2, TILE_M, P // 2], slim)
    weights = gl.allocate_shared_memory(gl.float16, [TILE_N, TILE_M], narrow)
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
                    shares_ptr, token_starts_ptr, row_lens_ptr, tree_words_ptr, cache_scale_ptr,
                    stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
                    stride_out_token, stride_out_head, stride_lse_token, stride_lse_head,
                    softmax_scale, num_heads, R, P, MASK, TREE_WORDS, TILE_M, TILE_N, BOX, STAGES,
                    MIN_UNITS, SPLIT_TILES, ROW_SHARE, FIXED_SPLITS,
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
        [40],
    )  # fmt: skip
