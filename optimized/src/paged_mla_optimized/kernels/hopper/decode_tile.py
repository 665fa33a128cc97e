"""Split attention in tiles of 64 query pairs on Hopper, three warpgroups (rules S-4 to S-7).

One warpgroup holds the queries in registers and computes scores and softmax; two compute half of
the latent columns of the answer each, and refill the ring of three key tiles as they go: no
warp only copies. ``PV`` of one tile runs while the softmax of the next does.

The ring's items are, for each segment, its queries and then its key tiles. Every barrier of a slot
completes once for every item, so that one phase bit serves them all:

``full``     both halves are loaded; for queries: both halves are free to stage them
``weighed``  the tile's weights are stored over its k_pe; for queries: they are in registers
``go``       all of this item's ``QK`` is issued, so ``PV`` of the item before may start
``left``     the left half has read the weights
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
    LAZY,
    LN_2,
    LOG2_E,
    arrivals,
    begin_weighing,
    clear_tail,
    copy_queries,
    copy_tile,
    find_segment,
    first_row,
    kept_pairs,
    leave_weighing,
    own_sums,
    partial_pairs,
    query_pairs,
    raised_in_twos,
    sees,
    state_pairs,
    state_stored,
    store_lse,
    taken_pairs,
)
from paged_mla_optimized.kernels.hopper.rope import load_q_pe, stage_loaded

# Offsets of the barriers in their array, three slots each but for the last.
_FULL = gl.constexpr(0)
_WEIGHED = gl.constexpr(3)
_GO = gl.constexpr(6)
_LEFT = gl.constexpr(9)
_SUMMED = gl.constexpr(12)


@gluon.jit
def _highest(s):
    """Return the highest of each line of scores [64, 64]: by halving, so that few wait in turn."""
    highest = s
    for halving in gl.static_range(3):
        highest = gl.max(highest.reshape([64, 2, 32 >> halving]), 1)
    return gl.convert_layout(gl.max(highest, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def _weigh_tiles(
    peak, total, q0, q1, q2, q3, q4, q_last, q_pe, ckv, k_pe, keeps, bars, tile_begin, tile_end,
    tile_edge, slot, phase, row, tile_m, seq_len, context_len, token_starts_ptr, tree_words_ptr,
    scale, num_heads, MASK: gl.constexpr, TREE_WORDS: gl.constexpr, BOX: gl.constexpr,
    FIXED_SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store the weights of key tiles; return peak [64] and own sums [64, 4], theirs included."""
    dtype: gl.constexpr = ckv.dtype
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    own_layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    for visit in range(tile_begin, tile_end):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        if BOX == 0:  # not copied by the engine that reads it next
            fence_async_shared()
        keys = ckv.index(slot)
        s = gl.zeros([64, 64], gl.float32, layout)
        s = warpgroup_mma(
            q0, keys.slice(0, 256, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q1, keys.slice(256, 128, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q2, keys.slice(384, 64, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q3, keys.slice(448, 32, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q4, keys.slice(480, 16, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_last, keys.slice(496, 16, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q_pe, k_pe.index(slot).permute((1, 0)), s, is_async=True)
        peak = warpgroup_mma_wait(6, deps=[peak])  # returns once the last product is queued
        mbarrier.arrive(bars.index(_GO + slot))
        s = warpgroup_mma_wait(0, deps=[s])
        if tile >= tile_edge:
            key = tile * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
            token, _head, index, live = query_pairs(
                token_starts_ptr, row, tile_m, num_heads, 64, pair_layout
            )
            visible = sees(
                key[None, :], seq_len, context_len, index[:, None], token[:, None],
                live[:, None], tree_words_ptr, MASK, TREE_WORDS,
            )  # fmt: skip
            s = gl.where(visible, s, float("-inf"))
        highest = _highest(s) * scale
        new_peak = raised_in_twos(peak, highest, highest > peak + LAZY)
        keep = gl.exp2(peak - new_peak)
        weights = gl.exp2(s * scale - new_peak[:, None])
        total = total * gl.convert_layout(keep, own_layout)[:, None] + own_sums(weights)
        peak = new_peak
        k_pe.index(slot).store(weights.to(dtype))
        keeps.index(slot).store(keep.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        slot += 1
        phase = gl.where(slot == 3, phase ^ 1, phase)
        slot = gl.where(slot == 3, 0, slot)
    return peak, total, slot, phase


@gluon.jit
def _hand_over(peak, total, sums, bars):
    """Hand the sums of weights [64] to both halves; return the lse."""
    is_empty = total == 0.0
    sums.store(gl.where(is_empty, 0.0, 1.0 / total))
    mbarrier.arrive(bars.index(_SUMMED))
    return gl.where(is_empty, float("-inf"), (peak + gl.log2(total)) * LN_2)


@gluon.jit
def _weigh(
    q_nope_ptr, q_pe_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, ckv, k_pe, q_pe, q_last, keeps,
    sums, bars, unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
    tree_words_ptr, stride_q_nope_token, stride_q_nope_head, stride_q_pe_token, stride_q_pe_head,
    stride_lse_token, stride_lse_head, positions_ptr, cos_ptr, sin_ptr, softmax_scale, num_heads,
    MASK: gl.constexpr, TREE_WORDS: gl.constexpr, BOX: gl.constexpr, FIXED_SPLITS: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Compute the weights of every tile of every segment, and the lse."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    scale = softmax_scale * LOG2_E
    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    slot = 0
    phase = 0
    mbarrier.arrive(bars.index(_GO))
    while unit < end:
        (
            following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, context_len,
            tile_begin, tile_end, tile_edge,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, 64, 64, FIXED_SPLITS,
        )  # fmt: skip
        loaded = load_q_pe(  # these loads need not wait for the slot
            q_pe_ptr, positions_ptr, cos_ptr, sin_ptr, stride_q_pe_token, stride_q_pe_head,
            token_starts_ptr, row, tile_m, context_len, num_heads, 64, 64, 4, MASK, ROPE,
        )  # fmt: skip
        mbarrier.wait(bars.index(_FULL + slot), phase)
        staged = ckv.index(slot)
        for first in gl.static_range(0, 512, 256):
            copy_queries(
                q_nope_ptr, stride_q_nope_token, stride_q_nope_head, token_starts_ptr, row, tile_m,
                num_heads, staged.slice(first, 256, dim=1), 64, first, 256,
            )  # fmt: skip
        copy_queries(
            q_nope_ptr, stride_q_nope_token, stride_q_nope_head, token_starts_ptr, row, tile_m,
            num_heads, q_last, 64, 496, 16,
        )  # fmt: skip
        stage_loaded(
            loaded, q_pe_ptr, stride_q_pe_token, stride_q_pe_head, token_starts_ptr, row, tile_m,
            num_heads, q_pe, 64, 64, ROPE,
        )  # fmt: skip
        async_copy.commit_group()
        async_copy.wait_group(0)
        # 124 registers a thread; with the other 20 the compiler would serialise the products.
        q0 = staged.slice(0, 256, dim=1).load(operand)
        q1 = staged.slice(256, 128, dim=1).load(operand)
        q2 = staged.slice(384, 64, dim=1).load(operand)
        q3 = staged.slice(448, 32, dim=1).load(operand)
        q4 = staged.slice(480, 16, dim=1).load(operand)
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        slot += 1
        phase = gl.where(slot == 3, phase ^ 1, phase)
        slot = gl.where(slot == 3, 0, slot)

        peak, total = begin_weighing(
            is_taken, shares_ptr, partial_out_ptr, partial_lse_ptr, FIXED_SPLITS, layout
        )
        peak, total, slot, phase = _weigh_tiles(
            peak, total, q0, q1, q2, q3, q4, q_last, q_pe, ckv, k_pe, keeps, bars, tile_begin,
            tile_end, tile_edge, slot, phase, row, tile_m, seq_len, context_len, token_starts_ptr,
            tree_words_ptr, scale, num_heads, MASK, TREE_WORDS, BOX, FIXED_SPLITS, layout,
        )  # fmt: skip
        mbarrier.arrive(bars.index(_GO + slot))
        mbarrier.wait(bars.index(_FULL + slot), phase)  # the sums before these have been read
        lse = _hand_over(peak, gl.convert_layout(gl.sum(total, 1), pair_layout), sums, bars)
        if FIXED_SPLITS == 0:  # decided early: a state that is never left does not compile
            store_lse(
                lse, is_whole, place, lse_ptr, partial_lse_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_lse_token, stride_lse_head,
                FIXED_SPLITS, pair_layout,
            )  # fmt: skip
        elif is_left:
            leave_weighing(peak, total, shares_ptr, partial_out_ptr, partial_lse_ptr, FIXED_SPLITS)
        else:
            store_lse(
                lse, is_whole, place, lse_ptr, partial_lse_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_lse_token, stride_lse_head,
                FIXED_SPLITS, pair_layout,
            )  # fmt: skip
        unit = following


@gluon.jit
def _begin_summing(
    is_taken, shares_ptr, partial_out_ptr, column, HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the sums [64, 256] to begin with."""
    acc = gl.zeros([64, 256], gl.float32, layout)
    if FIXED_SPLITS > 0:
        if is_taken:
            at = taken_pairs(shares_ptr, 1 + HALF, FIXED_SPLITS, 64, gl.SliceLayout(1, layout))
            acc = gl.load(partial_out_ptr + at[:, None] * 512 + column[None, :])
    return acc


@gluon.jit
def _sum_tiles(
    acc, cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, keeps, bars, table_row_ptr, tile_begin,
    tile_end, slot, phase, seq_len, stride_table_col, block_size, block_rows, stride_cache_row,
    BOX: gl.constexpr, HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add the weighted key tiles to the sums [64, 256], and keep the ring full."""
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    all_pairs: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # in every warp
    loads: gl.constexpr = arrivals(BOX)  # of one half
    FIRST: gl.constexpr = 256 * HALF
    for visit in range(tile_begin, tile_end):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        ahead = visited_tile(visit + 3, tile_begin, tile_end, FIXED_SPLITS)
        at = first_row(
            table_row_ptr, stride_table_col, ahead, seq_len, block_size, block_rows, 64, BOX
        )
        mbarrier.wait(bars.index(_WEIGHED + slot), phase)
        if gl.min(keeps.index(slot).load(all_pairs).to(gl.float32), 0) < 1.0:
            keep = keeps.index(slot).load(pair_layout).to(gl.float32)
            acc = acc * keep[:, None]
        values = ckv.index(slot).slice(FIRST, 256, dim=1)
        if BOX == 0:
            fence_async_shared()
        elif tile * 64 + 64 > seq_len:
            clear_tail(values, seq_len - tile * 64, 64, 256, 4)
            fence_async_shared()
        next_slot = gl.where(slot == 2, 0, slot + 1)
        next_phase = gl.where(slot == 2, phase ^ 1, phase)
        mbarrier.wait(bars.index(_GO + next_slot), next_phase)
        acc = warpgroup_mma(k_pe.index(slot), values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if HALF == 0:
            mbarrier.arrive(bars.index(_LEFT + slot))
        else:
            mbarrier.wait(bars.index(_LEFT + slot), phase)
        if visit + 3 < tile_end:
            copy_tile(
                cache_ptr, ckv_desc, k_pe_desc, values, k_pe.index(slot),
                bars.index(_FULL + slot), at, table_row_ptr, stride_table_col, ahead, seq_len,
                block_size, block_rows, stride_cache_row, 512, 64, BOX, FIRST, 256,
                HALF == 1,
            )  # fmt: skip
        if visit + 3 == tile_end:
            mbarrier.arrive(bars.index(_FULL + slot), count=loads)
        slot = next_slot
        phase = next_phase
    return acc, slot, phase


@gluon.jit
def _store_answers(
    acc, sums, column, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
    token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head,
    FIXED_SPLITS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Store columns of the answers of a query tile, or keep them as the partial of `place`."""
    acc = acc * sums.load(layout)[:, None]
    if is_whole:
        token, head, _index, live = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, 64, layout
        )
        pairs = token * stride_out_token + head * stride_out_head
        out_at = out_ptr + pairs[:, None] + column[None, :]
        gl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])
    else:
        at = partial_pairs(cut_ptr, shares_ptr, place, FIXED_SPLITS, 64, layout)
        partial_at = partial_out_ptr + at[:, None] * 512 + column[None, :]
        kept = kept_pairs(token_starts_ptr, row, tile_m, num_heads, FIXED_SPLITS, 64, layout)
        gl.store(partial_at, acc, mask=kept[:, None])


@gluon.jit
def _answer(
    cache_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe, keeps, sums, bars,
    block_table_ptr, unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr, row_lens_ptr,
    stride_table_row, stride_table_col, stride_out_token, stride_out_head, num_heads, block_size,
    block_rows, stride_cache_row, MASK: gl.constexpr, BOX: gl.constexpr, HALF: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Sum one half of the latent columns of every segment, and keep its half of the ring full."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    loads: gl.constexpr = arrivals(BOX)  # of one half
    FIRST: gl.constexpr = 256 * HALF
    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    slot = 0
    phase = 0
    odd = 0
    mbarrier.arrive(bars.index(_FULL), count=loads)
    while unit < end:
        (
            following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, _, tile_begin,
            tile_end, _,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, 64, 64, FIXED_SPLITS,
        )  # fmt: skip
        table_row_ptr = block_table_ptr + row.to(gl.int64) * stride_table_row
        q_slot = slot
        q_phase = phase
        slot = gl.where(q_slot == 2, 0, q_slot + 1)
        phase = gl.where(q_slot == 2, q_phase ^ 1, q_phase)
        target = slot
        for ahead in gl.static_range(3):
            if ahead == 2:  # where the queries are staged
                mbarrier.wait(bars.index(_WEIGHED + q_slot), q_phase)
                if HALF == 0:
                    mbarrier.arrive(bars.index(_LEFT + q_slot))
            if tile_begin + ahead < tile_end:
                tile = visited_tile(tile_begin + ahead, tile_begin, tile_end, FIXED_SPLITS)
                at = first_row(
                    table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows, 64, BOX
                )
                copy_tile(
                    cache_ptr, ckv_desc, k_pe_desc, ckv.index(target).slice(FIRST, 256, dim=1),
                    k_pe.index(target), bars.index(_FULL + target), at, table_row_ptr,
                    stride_table_col, tile, seq_len, block_size, block_rows, stride_cache_row, 512,
                    64, BOX, FIRST, 256, HALF == 1,
                )  # fmt: skip
            if tile_begin + ahead == gl.maximum(tile_end, tile_begin):
                mbarrier.arrive(bars.index(_FULL + target), count=loads)  # for the next queries
            target = gl.where(target == 2, 0, target + 1)

        column = FIRST + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
        acc = _begin_summing(
            is_taken, shares_ptr, partial_out_ptr, column, HALF, FIXED_SPLITS, layout
        )
        acc, slot, phase = _sum_tiles(
            acc, cache_ptr, ckv_desc, k_pe_desc, ckv, k_pe, keeps, bars, table_row_ptr, tile_begin,
            tile_end, slot, phase, seq_len, stride_table_col, block_size, block_rows,
            stride_cache_row, BOX, HALF, FIXED_SPLITS, layout,
        )  # fmt: skip
        mbarrier.wait(bars.index(_SUMMED), odd)
        odd ^= 1
        if FIXED_SPLITS == 0:  # decided early: a state that is never left does not compile
            _store_answers(
                acc, sums, column, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head,
                FIXED_SPLITS, pair_layout,
            )  # fmt: skip
        elif is_left:
            at = state_pairs(gl.program_id(0), 64, pair_layout)
            gl.store(partial_out_ptr + at[:, None] * 512 + column[None, :], acc)
            state_stored(shares_ptr, 1 + HALF, FIXED_SPLITS)
        else:
            _store_answers(
                acc, sums, column, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head,
                FIXED_SPLITS, pair_layout,
            )  # fmt: skip
        unit = following


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@gluon.jit(do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head"])
def decode_tile_kernel(
    q_nope_ptr,  # [T, H, 512]
    q_pe_ptr,  # [T, H, 64]
    block_table_ptr,  # int32 [B, M]
    unit_starts_ptr,
    cut_ptr,
    shares_ptr,
    token_starts_ptr,
    row_lens_ptr,
    tree_words_ptr,  # int32 [T, TREE_WORDS]
    cache_ptr,  # read where no box fits: rows of 512 + 64
    out_ptr,  # [T, H, 512]
    lse_ptr,  # float32 [T, H]
    partial_out_ptr,  # float32 [tiles, 64, 512]
    partial_lse_ptr,  # float32 [tiles, 64]
    positions_ptr,  # int64 [T]; with a rope alone, as the tables
    cos_ptr,  # [max_model_len, 32]
    sin_ptr,
    ckv_desc,  # [cache rows, 512 + 64], boxes [BOX, 256]
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
    MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr,
    BOX: gl.constexpr,  # keys of one copy; 0: every thread copies 16 bytes of a key at a time
    FIXED_SPLITS: gl.constexpr,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
):
    dtype: gl.constexpr = q_nope_ptr.dtype.element_ty
    rows_layout: gl.constexpr = ckv_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(dtype, [3, 64, 512], rows_layout)
    k_pe = gl.allocate_shared_memory(dtype, [3, 64, 64], rows_layout)
    keeps = gl.allocate_shared_memory(gl.bfloat16, [3, 64], flat)
    sums = gl.allocate_shared_memory(gl.float32, [64], flat)
    q_pe = gl.allocate_shared_memory(dtype, [64, 64], rows_layout)
    q_last = gl.allocate_shared_memory(dtype, [64, 16], gl.NVMMASharedLayout(32, 16, 2))
    bars = gl.allocate_shared_memory(gl.int64, [13, 1], mbarrier.MBarrierLayout())
    loads: gl.constexpr = arrivals(BOX)
    for bar in gl.static_range(13):
        if bar < _WEIGHED:
            mbarrier.init(bars.index(bar), count=2 * loads)
        else:
            mbarrier.init(bars.index(bar), count=1)
    fence_async_shared()
    gdc_wait()  # for what this step's earlier kernels wrote; launched before they end
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _weigh,
                (
                    q_nope_ptr, q_pe_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, ckv, k_pe,
                    q_pe, q_last, keeps, sums, bars, unit_starts_ptr, cut_ptr, shares_ptr,
                    token_starts_ptr, row_lens_ptr, tree_words_ptr, stride_q_nope_token,
                    stride_q_nope_head, stride_q_pe_token, stride_q_pe_head, stride_lse_token,
                    stride_lse_head, positions_ptr, cos_ptr, sin_ptr, softmax_scale, num_heads,
                    MASK, TREE_WORDS, BOX, FIXED_SPLITS, ROPE,
                ),
            ),
            (
                _answer,
                (
                    cache_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe, keeps,
                    sums, bars, block_table_ptr, unit_starts_ptr, cut_ptr, shares_ptr,
                    token_starts_ptr, row_lens_ptr, stride_table_row, stride_table_col,
                    stride_out_token, stride_out_head, num_heads, block_size, block_rows,
                    stride_cache_row, MASK, BOX, 0, FIXED_SPLITS,
                ),
            ),
            (
                _answer,
                (
                    cache_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe, keeps,
                    sums, bars, block_table_ptr, unit_starts_ptr, cut_ptr, shares_ptr,
                    token_starts_ptr, row_lens_ptr, stride_table_row, stride_table_col,
                    stride_out_token, stride_out_head, num_heads, block_size, block_rows,
                    stride_cache_row, MASK, BOX, 1, FIXED_SPLITS,
                ),
            ),
        ],
        [4, 4],
        [160, 160],
    )  # fmt: skip
