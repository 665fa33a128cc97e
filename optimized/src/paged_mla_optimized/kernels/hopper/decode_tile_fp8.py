"""Split attention by FP8 products in tiles of 64 query pairs on Hopper (rules S-4 to S-7).

For e4m3 queries with a scale each, over an e4m3 cache with one scale. One warpgroup computes scores
and softmax; two compute half of the latent columns of the answer each, and refill their half of the
ring of five key tiles as they go: no warp only copies. ``PV`` of one tile runs while the softmax of
the next does.

Products of FP8 read both operands along what they sum over. ``QK`` has that in the copied tile. For
``PV`` the values come from registers, transposed on the way: the tile is read as 16-bit elements,
two columns each, and what four such elements of four keys hold is sorted by bytes into an even
column and an odd one. The answers are transposed too, ``O^T = V^T P^T``: even columns are the rows
of one accumulator, odd ones of another.

Every barrier of a slot completes once for every key tile, so that one phase bit serves them all:

``full``     both halves are loaded
``weighed``  the tile's weights are stored over its k_pe
``go``       all of this tile's ``QK`` is issued, so ``PV`` of the tile before may start
``left``     the left half has read the weights

Weights are rounded to e4m3 before they are summed too: where one key dominates, its error cancels.
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

from paged_mla_optimized.kernels.common.scales import load_scales
from paged_mla_optimized.kernels.common.schedule import share_of_program, visited_tile
from paged_mla_optimized.kernels.hopper.common import (
    FLOOR,
    LN_2,
    LOG2_E,
    arrivals,
    begin_weighing,
    clear_tail,
    copy_queries,
    copy_tile,
    find_segment,
    first_row,
    higher,
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

_SLOTS = gl.constexpr(5)
# Offsets of the barriers in their array, one for each slot but for the last two.
_FULL = gl.constexpr(0)
_WEIGHED = gl.constexpr(5)
_GO = gl.constexpr(10)
_LEFT = gl.constexpr(15)
_SUMMED = gl.constexpr(20)
_READ = gl.constexpr(21)
_BARS = gl.constexpr(22)

# Weights lie below 2 ** 8 and are normal numbers of e4m3 down to 2 ** -6.
_LIFT = gl.constexpr(4.0)  # of the highest weight when the peak was set, as an exponent
_LAZY = gl.constexpr(4.0)  # how much further later ones may rise

_TINY = gl.constexpr(2.0**-126)  # keeps scales that vanish from making NaN of masked scores
_LEAST = gl.constexpr(2.0**-90)  # a key's scale counts as this at least where its value is weighed
_E4M3 = gl.constexpr(gl.float8e4nv)
_CKV = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))  # the same bytes as 16-bit elements have
_K_PE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_VALUES = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 4))
_KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_VALUE_WORDS = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
)


@gluon.jit
def _regroup(x, ROWS: gl.constexpr):
    """Reorder the keys of each 16: those a thread holds of 16-bit elements become neighbours."""
    return x.reshape([ROWS, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, 64])


@gluon.jit
def _columns(words):
    """Return the even and the odd columns of int16 `words`, pairs of columns of four keys each."""
    return gl.inline_asm_elementwise(
        "{ prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531; }", "=r,=r,r,r", [words],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _rounded(weights):
    """Return positive `weights` with the three bits of mantissa that e4m3 keeps.

    Rounded as integers, since ptxas 12.8 mixes up e4m3 values that are used twice.
    """
    bits = weights.to(gl.int32, bitcast=True)
    return ((bits + 0x80000) & -0x100000).to(gl.float32, bitcast=True)


@gluon.jit
def _masked(
    s, first, seq_len, context_len, row, tile_m, token_starts_ptr, tree_words_ptr, num_heads,
    MASK: gl.constexpr, TREE_WORDS: gl.constexpr,
):  # fmt: skip
    """Return the scores of keys from `first` on, those of keys that a query does not see -inf.

    Keys are counted from where a thread's own begin, so that they are constants, not registers.
    """
    eights = s.reshape([64, 8, 8])
    layout: gl.constexpr = eights.type.layout
    own = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    token, _head, index, live = query_pairs(
        token_starts_ptr, row, tile_m, num_heads, 64, gl.SliceLayout(1, gl.SliceLayout(2, layout))
    )
    begin = first + own[None, None, :]
    visible = sees(
        key[None, :, None], seq_len - begin, context_len - begin, index[:, None, None],
        token[:, None, None], live[:, None, None], tree_words_ptr, MASK, TREE_WORDS,
    )  # fmt: skip
    return gl.convert_layout(gl.where(visible, eights, float("-inf")).reshape([64, 64]), _PRODUCT)


@gluon.jit
def _weigh_tiles(
    peak, total, q_first, q, q_pe, ckv, k_pe, key_scales, keeps, bars, tile_begin, tile_end,
    tile_edge, slot, phase, row, tile_m, seq_len, context_len, token_starts_ptr, tree_words_ptr,
    scale, num_heads, SCALES: gl.constexpr, MASK: gl.constexpr, TREE_WORDS: gl.constexpr,
    BOX: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Store the weights of key tiles; return peak [64] and own sums [64, 4], theirs included."""
    key_layout: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    own_layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    for visit in range(tile_begin, tile_end):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        if BOX == 0:  # not copied by the engine that reads it next
            fence_async_shared()
        keys = ckv.index(slot)._reinterpret(_E4M3, [64, 512], _CKV).permute((1, 0))
        key_pes = k_pe.index(slot)._reinterpret(_E4M3, [64, 64], _K_PE).permute((1, 0))
        s = gl.zeros([64, 64], gl.float32, _PRODUCT)
        s = warpgroup_mma(q_first, keys.slice(0, 256, dim=0), s, use_acc=False, is_async=True)
        s = warpgroup_mma(q.slice(256, 256, dim=1), keys.slice(256, 256, dim=0), s, is_async=True)
        s = warpgroup_mma(q_pe, key_pes, s, is_async=True)
        peak = warpgroup_mma_wait(3, deps=[peak])  # returns once the last product is queued
        mbarrier.arrive(bars.index(_GO + slot))
        s = warpgroup_mma_wait(0, deps=[s])
        if SCALES != "scalar":  # powers of the weights of values, which hold their scales
            s = s * key_scales.index(3 * slot).load(key_layout)[None, :] * scale[:, None]
            s += key_scales.index(3 * slot + 1).load(key_layout)[None, :]
        if tile >= tile_edge:
            s = _masked(
                s, tile * 64, seq_len, context_len, row, tile_m, token_starts_ptr, tree_words_ptr,
                num_heads, MASK, TREE_WORDS,
            )  # fmt: skip
        highest = gl.reduce(s, 1, higher)
        if SCALES == "scalar":
            highest *= scale
        new_peak = raised_in_twos(peak, highest, (highest <= peak + _LAZY) == 0)
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        power = s * scale[:, None] if SCALES == "scalar" else s
        weights = _rounded(gl.exp2(power - (peak - _LIFT)[:, None]))
        unscaled = weights
        if SCALES != "scalar":
            unscaled *= key_scales.index(3 * slot + 2).load(key_layout)[None, :]
        total = total * gl.convert_layout(keep, own_layout)[:, None] + own_sums(unscaled)
        stored = k_pe.index(slot)._reinterpret(_E4M3, [64, 64], _K_PE)
        stored.store(_regroup(weights, 64).to(_E4M3))
        keeps.index(slot).store(keep)
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        phase = gl.where(slot == _SLOTS - 1, phase ^ 1, phase)
        slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    return peak, total, slot, phase


@gluon.jit
def _hand_over(peak, total, cache_scale, sums, bars, odd):
    """Hand what scales their sums [64] to both halves; return the lse."""
    is_empty = (total == 0.0) & (peak == FLOOR)  # not so where a score is infinite
    mbarrier.wait(bars.index(_READ), odd ^ 1)  # those before these
    sums.store(gl.where(is_empty, 0.0, cache_scale / total))
    mbarrier.arrive(bars.index(_SUMMED))
    return gl.where(is_empty, float("-inf"), (peak - _LIFT + gl.log2(total)) * LN_2)


@gluon.jit
def _weigh(
    q_ptr, q_scale_ptr, scales_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, ckv, k_pe, q_words,
    q_pe_words, key_scales, keeps, sums, bars, unit_starts_ptr, cut_ptr, shares_ptr,
    token_starts_ptr, row_lens_ptr, tree_words_ptr, stride_lse_token, stride_lse_head,
    softmax_scale, num_heads, SCALES: gl.constexpr, MASK: gl.constexpr, TREE_WORDS: gl.constexpr,
    BOX: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Compute the weights of every tile of every segment, and the lse."""
    pair_layout: gl.constexpr = gl.SliceLayout(1, _PRODUCT)
    q = q_words._reinterpret(_E4M3, [64, 512], _CKV)
    q_pe = q_pe_words._reinterpret(_E4M3, [64, 64], _K_PE)
    cache_scale = gl.load(scales_ptr) if SCALES == "scalar" else 1.0
    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    slot = 0
    phase = 0
    odd = 0
    while unit < end:
        (
            following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, context_len,
            tile_begin, tile_end, tile_edge,
        ) = find_segment(
            unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row,
            MASK, 64, 64, FIXED_SPLITS,
        )  # fmt: skip
        copy_queries(
            q_ptr, num_heads * 288, 288, token_starts_ptr, row, tile_m, num_heads, q_words, 64, 0,
            256,
        )  # fmt: skip
        copy_queries(
            q_ptr, num_heads * 288, 288, token_starts_ptr, row, tile_m, num_heads, q_pe_words, 64,
            256, 32,
        )  # fmt: skip
        async_copy.commit_group()
        token, head, _index, live = query_pairs(
            token_starts_ptr, row, tile_m, num_heads, 64, pair_layout
        )
        q_scale = gl.load(q_scale_ptr + token * num_heads + head, mask=live, other=1.0)
        scale = q_scale * (cache_scale * softmax_scale * LOG2_E) + _TINY
        async_copy.wait_group(0)
        fence_async_shared()
        q_first = q.slice(0, 256, dim=1).load(_VALUES)  # the others would not fit

        peak, total = begin_weighing(
            is_taken, shares_ptr, partial_out_ptr, partial_lse_ptr, FIXED_SPLITS, _PRODUCT
        )
        peak, total, slot, phase = _weigh_tiles(
            peak, total, q_first, q, q_pe, ckv, k_pe, key_scales, keeps, bars, tile_begin, tile_end,
            tile_edge, slot, phase, row, tile_m, seq_len, context_len, token_starts_ptr,
            tree_words_ptr, scale, num_heads, SCALES, MASK, TREE_WORDS, BOX, FIXED_SPLITS,
        )  # fmt: skip
        all_own = gl.convert_layout(gl.sum(total, 1), pair_layout)
        lse = _hand_over(peak, all_own, cache_scale, sums, bars, odd)
        odd ^= 1
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
def _blocks_of_keys(table_row_ptr, stride_table_col, tile, seq_len, block_size):
    """Load the block id of each key [64] of a tile."""
    key = tile * 64 + gl.arange(0, 64, layout=_KEYS)
    entry = (key // block_size).to(gl.int64) * stride_table_col
    return gl.load(table_row_ptr + entry, mask=key < seq_len, other=0).to(gl.int64)


@gluon.jit
def _scales_of_keys(
    scales_ptr, stride_scales_block, blocks, tile, seq_len, block_size, SCALES: gl.constexpr
):
    """Load the scale of each key [64] of a tile; 1 past the row."""
    key = tile * 64 + gl.arange(0, 64, layout=_KEYS)
    return load_scales(
        scales_ptr, blocks, key % block_size, stride_scales_block, block_size, key < seq_len, SCALES
    )


@gluon.jit
def _hand_scales(scale, key_scales, bars, slot, is_wanted):
    """Hand on a tile's scales, logarithms of what counts as them, and reciprocals of that."""
    counted = gl.where(gl.abs(scale) < _LEAST, _LEAST, scale)  # below 0 there is no logarithm
    key_scales.index(3 * slot).store(scale)
    key_scales.index(3 * slot + 1).store(gl.log2(counted))
    key_scales.index(3 * slot + 2).store(1.0 / counted)
    mbarrier.arrive(bars.index(_FULL + slot), pred=is_wanted)


@gluon.jit
def _sum_tiles(
    even, odd, cache_ptr, scales_ptr, ckv_desc, k_pe_desc, ckv, k_pe, key_scales, keeps, bars,
    table_row_ptr, tile_begin, tile_end, slot, phase, seq_len, stride_table_col,
    stride_scales_block, block_size, block_rows, stride_cache_row, SCALES: gl.constexpr,
    BOX: gl.constexpr, HALF: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Add weighted key tiles to sums [128, 64] of even and odd columns, and keep the ring full."""
    pair_layout: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    all_pairs: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # in every warp
    for visit in range(tile_begin, tile_end):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        ahead = visited_tile(visit + _SLOTS, tile_begin, tile_end, FIXED_SPLITS)
        at = first_row(
            table_row_ptr, stride_table_col, ahead, seq_len, block_size, block_rows, 64, BOX
        )
        if SCALES != "scalar" and HALF == 0:
            blocks = _blocks_of_keys(table_row_ptr, stride_table_col, ahead, seq_len, block_size)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        values = ckv.index(slot).slice(128 * HALF, 128, dim=1)
        if BOX > 0 and tile * 64 + 64 > seq_len:
            clear_tail(values, seq_len - tile * 64, 64, 128, 4)
            fence_async_shared()
        words = _regroup(values.permute((1, 0)).load(_VALUE_WORDS), 128)
        values_even, values_odd = _columns(gl.convert_layout(words, _VALUES, assert_trivial=True))
        mbarrier.wait(bars.index(_WEIGHED + slot), phase)
        if SCALES != "scalar" and HALF == 0:
            scale = _scales_of_keys(
                scales_ptr, stride_scales_block, blocks, ahead, seq_len, block_size, SCALES
            )
        keep_bits = keeps.index(slot).load(all_pairs).to(gl.int32, bitcast=True)
        if gl.min(keep_bits, 0) < 0x3F800000:  # 1.0: positive numbers compare as integers do
            keep = keeps.index(slot).load(pair_layout)
            even = even * keep[None, :]
            odd = odd * keep[None, :]
        next_slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
        next_phase = gl.where(slot == _SLOTS - 1, phase ^ 1, phase)
        mbarrier.wait(bars.index(_GO + next_slot), next_phase, pred=visit + 1 < tile_end)
        weights = k_pe.index(slot)._reinterpret(_E4M3, [64, 64], _K_PE).permute((1, 0))
        even = warpgroup_mma(values_even, weights, even, is_async=True)
        odd = warpgroup_mma(values_odd, weights, odd, is_async=True)
        even, odd = warpgroup_mma_wait(0, deps=[even, odd])
        if HALF == 0:
            mbarrier.arrive(bars.index(_LEFT + slot))
        else:
            mbarrier.wait(bars.index(_LEFT + slot), phase)
        if visit + _SLOTS < tile_end:
            copy_tile(
                cache_ptr, ckv_desc, k_pe_desc, values, k_pe.index(slot), bars.index(_FULL + slot),
                at, table_row_ptr, stride_table_col, ahead, seq_len, block_size, block_rows,
                stride_cache_row, 256, 64, BOX, 128 * HALF, 128, HALF == 1,
            )  # fmt: skip
            if SCALES != "scalar" and HALF == 0:
                _hand_scales(scale, key_scales, bars, slot, True)
        slot = next_slot
        phase = next_phase
    return even, odd, slot, phase


@gluon.jit
def _begin_scales(
    scales_ptr, key_scales, bars, table_row_ptr, tile_begin, tile_end, slot, seq_len,
    stride_table_col, stride_scales_block, block_size, SCALES: gl.constexpr,
    FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Hand on the scales of a segment's first key tiles, all loaded before any is awaited."""
    scales = ()
    for ahead in gl.static_range(_SLOTS):
        tile = visited_tile(tile_begin + ahead, tile_begin, tile_end, FIXED_SPLITS)
        blocks = _blocks_of_keys(table_row_ptr, stride_table_col, tile, seq_len, block_size)
        scales += (
            _scales_of_keys(
                scales_ptr, stride_scales_block, blocks, tile, seq_len, block_size, SCALES
            ),
        )
    for ahead in gl.static_range(_SLOTS):
        target = gl.where(slot + ahead >= _SLOTS, slot + ahead - _SLOTS, slot + ahead)
        _hand_scales(scales[ahead], key_scales, bars, target, tile_begin + ahead < tile_end)


@gluon.jit
def _begin_segment(
    cache_ptr, scales_ptr, ckv_desc, k_pe_desc, ckv, k_pe, key_scales, bars, block_table_ptr,
    unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, unit, end, row, slot,
    stride_table_row, stride_table_col, stride_scales_block, num_heads, block_size, block_rows,
    stride_cache_row, SCALES: gl.constexpr, MASK: gl.constexpr, BOX: gl.constexpr,
    HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Find the segment that starts with `unit`, and ask for its first key tiles."""
    (
        following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, _, tile_begin,
        tile_end, _,
    ) = find_segment(
        unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, num_heads, unit, end, row, MASK,
        64, 64, FIXED_SPLITS,
    )  # fmt: skip
    table_row_ptr = block_table_ptr + row.to(gl.int64) * stride_table_row
    target = slot
    for visit in range(tile_begin, gl.minimum(tile_begin + _SLOTS, tile_end)):
        tile = visited_tile(visit, tile_begin, tile_end, FIXED_SPLITS)
        at = first_row(
            table_row_ptr, stride_table_col, tile, seq_len, block_size, block_rows, 64, BOX
        )
        copy_tile(
            cache_ptr, ckv_desc, k_pe_desc, ckv.index(target).slice(128 * HALF, 128, dim=1),
            k_pe.index(target), bars.index(_FULL + target), at, table_row_ptr, stride_table_col,
            tile, seq_len, block_size, block_rows, stride_cache_row, 256, 64, BOX, 128 * HALF, 128,
            HALF == 1,
        )  # fmt: skip
        target = gl.where(target == _SLOTS - 1, 0, target + 1)
    if SCALES != "scalar" and HALF == 0:
        _begin_scales(
            scales_ptr, key_scales, bars, table_row_ptr, tile_begin, tile_end, slot, seq_len,
            stride_table_col, stride_scales_block, block_size, SCALES, FIXED_SPLITS,
        )  # fmt: skip
    return (
        following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, tile_begin, tile_end,
    )  # fmt: skip


@gluon.jit
def _factor(sums, bars, parity):
    """Return what scales the sums [128, 64] of a query tile, once it is known."""
    mbarrier.wait(bars.index(_SUMMED), parity)
    factor = sums.load(gl.SliceLayout(0, _PRODUCT))[None, :]
    mbarrier.arrive(bars.index(_READ))
    return factor


@gluon.jit
def _state_at(pairs, HALF: gl.constexpr):
    """Return where the even columns [128, 64] of one half lie in a state, of `pairs` [64]."""
    couple = gl.arange(0, 128, layout=gl.SliceLayout(1, _PRODUCT))
    return pairs[None, :] * 512 + 256 * HALF + couple[:, None] * 2


@gluon.jit
def _begin_summing(
    is_taken, shares_ptr, partial_out_ptr, HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr
):
    """Return the sums [128, 64] of even and of odd columns to begin with."""
    even = gl.zeros([128, 64], gl.float32, _PRODUCT)
    odd = gl.zeros([128, 64], gl.float32, _PRODUCT)
    if FIXED_SPLITS > 0:
        if is_taken:
            pair_layout: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
            pairs = taken_pairs(shares_ptr, 1 + HALF, FIXED_SPLITS, 64, pair_layout)
            even_at = partial_out_ptr + _state_at(pairs, HALF)
            even = gl.load(even_at)
            odd = gl.load(even_at + 1)
    return even, odd


@gluon.jit
def _store_columns(answers, out_ptr, at, live, HALF: gl.constexpr):
    """Store answers [128, 64, 2], those of a pair from `at` on."""
    columns_layout: gl.constexpr = gl.SliceLayout(1, answers.type.layout)
    couple = gl.arange(0, 128, layout=gl.SliceLayout(1, columns_layout))
    parity = gl.arange(0, 2, layout=gl.SliceLayout(0, columns_layout))
    column = 256 * HALF + couple[:, None] * 2 + parity[None, :]
    out_at = out_ptr + at[None, :, None] + column.expand_dims(1)
    gl.store(out_at, answers.to(out_ptr.dtype.element_ty), mask=live[None, :, None])


@gluon.jit
def _store_answers(
    even, odd, factor, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
    token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head,
    HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Store the answers of a query tile, or keep them as the partial that `place` says."""
    answers = gl.join(even * factor, odd * factor)
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, answers.type.layout))
    partial = partial_pairs(cut_ptr, shares_ptr, place, FIXED_SPLITS, 64, layout)
    token, head, _index, live = query_pairs(token_starts_ptr, row, tile_m, num_heads, 64, layout)
    if is_whole:
        at = token * stride_out_token + head * stride_out_head
        _store_columns(answers, out_ptr, at, live, HALF)
    else:
        _store_columns(answers, partial_out_ptr, partial * 512, live, HALF)


@gluon.jit
def _answer(
    cache_ptr, scales_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe, key_scales,
    keeps, sums, bars, block_table_ptr, unit_starts_ptr, cut_ptr, shares_ptr, token_starts_ptr,
    row_lens_ptr, stride_table_row, stride_table_col, stride_scales_block, stride_out_token,
    stride_out_head, num_heads, block_size, block_rows, stride_cache_row, SCALES: gl.constexpr,
    MASK: gl.constexpr, BOX: gl.constexpr, HALF: gl.constexpr, FIXED_SPLITS: gl.constexpr,
):  # fmt: skip
    """Sum one half of the latent columns of every segment, and keep its half of the ring full."""
    unit, end, row = share_of_program(shares_ptr, FIXED_SPLITS)
    slot = 0
    phase = 0
    parity = 0
    while unit < end:
        (
            following, place, is_whole, is_left, is_taken, row, tile_m, seq_len, tile_begin,
            tile_end,
        ) = _begin_segment(
            cache_ptr, scales_ptr, ckv_desc, k_pe_desc, ckv, k_pe, key_scales, bars,
            block_table_ptr, unit_starts_ptr, cut_ptr, token_starts_ptr, row_lens_ptr, unit, end,
            row, slot, stride_table_row, stride_table_col, stride_scales_block, num_heads,
            block_size, block_rows, stride_cache_row, SCALES, MASK, BOX, HALF, FIXED_SPLITS,
        )  # fmt: skip
        table_row_ptr = block_table_ptr + row.to(gl.int64) * stride_table_row
        even, odd = _begin_summing(is_taken, shares_ptr, partial_out_ptr, HALF, FIXED_SPLITS)
        even, odd, slot, phase = _sum_tiles(
            even, odd, cache_ptr, scales_ptr, ckv_desc, k_pe_desc, ckv, k_pe, key_scales, keeps,
            bars, table_row_ptr, tile_begin, tile_end, slot, phase, seq_len, stride_table_col,
            stride_scales_block, block_size, block_rows, stride_cache_row, SCALES, BOX, HALF,
            FIXED_SPLITS,
        )  # fmt: skip
        factor = _factor(sums, bars, parity)
        parity ^= 1
        if FIXED_SPLITS == 0:  # decided early: a state that is never left does not compile
            _store_answers(
                even, odd, factor, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head, HALF,
                FIXED_SPLITS,
            )  # fmt: skip
        elif is_left:
            pairs = state_pairs(gl.program_id(0), 64, gl.SliceLayout(0, _PRODUCT))
            even_at = partial_out_ptr + _state_at(pairs, HALF)
            gl.store(even_at, even)
            gl.store(even_at + 1, odd)
            state_stored(shares_ptr, 1 + HALF, FIXED_SPLITS)
        else:
            _store_answers(
                even, odd, factor, is_whole, place, out_ptr, partial_out_ptr, cut_ptr, shares_ptr,
                token_starts_ptr, row, tile_m, num_heads, stride_out_token, stride_out_head, HALF,
                FIXED_SPLITS,
            )  # fmt: skip
        unit = following


# Not specialised: what varies from step to step, or with how an engine slices its buffers.
@gluon.jit(
    do_not_specialize=["stride_table_row", "stride_lse_token", "stride_lse_head"],
    do_not_specialize_on_alignment=["scales_ptr"],
)
def decode_tile_fp8_kernel(
    q_ptr,  # e4m3 [T, H, 512 + 64], as bytes
    q_scale_ptr,  # float32 [T, H]
    block_table_ptr,  # int32 [B, M]
    unit_starts_ptr,
    cut_ptr,
    shares_ptr,
    token_starts_ptr,
    row_lens_ptr,
    tree_words_ptr,  # int32 [T, TREE_WORDS]
    cache_ptr,  # read where no box fits: e4m3 rows of 512 + 64, as bytes
    scales_ptr,  # float32 [], or [num_blocks, 1, G]
    out_ptr,  # [T, H, 512]
    lse_ptr,  # float32 [T, H]
    partial_out_ptr,  # float32 [tiles, 64, 512]
    partial_lse_ptr,  # float32 [tiles, 64]
    ckv_desc,  # [cache rows, 256 + 32], boxes [BOX, 128]
    k_pe_desc,  # the same, boxes [BOX, 32]
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
    stride_cache_row: gl.constexpr,  # in words of two bytes
    stride_scales_block: gl.constexpr,
    SCALES: gl.constexpr,  # where they lie, as MlaConfig.scales says
    MASK: gl.constexpr,
    TREE_WORDS: gl.constexpr,
    BOX: gl.constexpr,  # keys of one copy; 0: every thread copies 16 bytes of a key at a time
    FIXED_SPLITS: gl.constexpr,
):
    q_ptr = q_ptr.to(gl.pointer_type(gl.int16))
    cache_ptr = cache_ptr.to(gl.pointer_type(gl.int16))
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(gl.int16, [_SLOTS, 64, 256], ckv_desc.layout)
    k_pe = gl.allocate_shared_memory(gl.int16, [_SLOTS, 64, 32], k_pe_desc.layout)
    q = gl.allocate_shared_memory(gl.int16, [64, 256], ckv_desc.layout)
    q_pe = gl.allocate_shared_memory(gl.int16, [64, 32], k_pe_desc.layout)
    if SCALES == "scalar":
        key_scales: gl.constexpr = None
    else:
        key_scales = gl.allocate_shared_memory(gl.float32, [_SLOTS * 3, 64], flat)
    keeps = gl.allocate_shared_memory(gl.float32, [_SLOTS, 64], flat)
    sums = gl.allocate_shared_memory(gl.float32, [64], flat)
    bars = gl.allocate_shared_memory(gl.int64, [_BARS, 1], mbarrier.MBarrierLayout())
    loads: gl.constexpr = 2 * arrivals(BOX) + (SCALES != "scalar")
    for bar in gl.static_range(_BARS):
        if bar < _WEIGHED:
            mbarrier.init(bars.index(bar), count=loads)
        else:
            mbarrier.init(bars.index(bar), count=2 if bar == _READ else 1)
    fence_async_shared()
    gdc_wait()  # for what this step's earlier kernels wrote; launched before they end
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _weigh,
                (
                    q_ptr, q_scale_ptr, scales_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr, ckv,
                    k_pe, q, q_pe, key_scales, keeps, sums, bars, unit_starts_ptr, cut_ptr,
                    shares_ptr, token_starts_ptr, row_lens_ptr, tree_words_ptr, stride_lse_token,
                    stride_lse_head, softmax_scale, num_heads, SCALES, MASK, TREE_WORDS, BOX,
                    FIXED_SPLITS,
                ),
            ),
            (
                _answer,
                (
                    cache_ptr, scales_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe,
                    key_scales, keeps, sums, bars, block_table_ptr, unit_starts_ptr, cut_ptr,
                    shares_ptr, token_starts_ptr, row_lens_ptr, stride_table_row, stride_table_col,
                    stride_scales_block, stride_out_token, stride_out_head, num_heads, block_size,
                    block_rows, stride_cache_row, SCALES, MASK, BOX, 0, FIXED_SPLITS,
                ),
            ),
            (
                _answer,
                (
                    cache_ptr, scales_ptr, ckv_desc, k_pe_desc, out_ptr, partial_out_ptr, ckv, k_pe,
                    key_scales, keeps, sums, bars, block_table_ptr, unit_starts_ptr, cut_ptr,
                    shares_ptr, token_starts_ptr, row_lens_ptr, stride_table_row, stride_table_col,
                    stride_scales_block, stride_out_token, stride_out_head, num_heads, block_size,
                    block_rows, stride_cache_row, SCALES, MASK, BOX, 1, FIXED_SPLITS,
                ),
            ),
        ],
        [4, 4],
        [192, 192],
    )  # fmt: skip
