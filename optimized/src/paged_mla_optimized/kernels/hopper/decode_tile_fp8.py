"""Split attention with FP8 products in tiles of 64 pairs on Hopper (S-4 to S-7, S-11, S-20).

The queries are e4m3 codes with one scale for each pair. The cache is e4m3 with one scale, or with
scales of tokens or groups. ``common/quantize.py`` writes the queries in a launch before this one.

The grid has a fixed number of programs. A program works on the segments of its share, one after
another (``schedule.py``). It stores `out` and `lse` of whole groups, and partial results of the
others, which ``combine.py`` joins. With FIXED_SPLITS it may wait for the state of another program
(``split_handoff.py``).

A program has three warp groups. The first (``_weigh``) computes scores and softmax. Each of the two
others (``_answer``) computes half of the latent columns of the outputs, and copies its half of the
keys into a ring of five slots. No warp only copies. ``PV`` of one tile runs during the softmax of
the next tile.

FP8 products require that both operands are contiguous along the contracted dimension. For ``QK``
the copied tile is. For ``PV`` the values come from registers and are transposed on the way. The
kernel reads the tile as 16-bit elements of two columns each. From four such elements, of four keys,
it sorts the bytes into an even and an odd column. The outputs are transposed too,
``O^T = V^T P^T``: even columns are the rows of one accumulator, and odd columns those of another.

Every barrier of a slot completes once for every key tile, so that one phase bit serves all of them:

``full``     both halves of the tile are loaded, and its scales are stored if keys have scales
``weighed``  the weights of the tile are stored over its k_pe
``go``       ``QK`` of this tile is issued, so that ``PV`` of the tile before may start
``left``     the left half has read the weights

Two more barriers complete once for every segment: ``summed``, when the factors of the outputs are
stored, and ``read``, when both halves have read them.

The kernel rounds weights to e4m3 before it sums them for the division of the outputs. If one key
dominates, its rounding error cancels.
"""

from typing import NamedTuple

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

from paged_mla_optimized.kernels.common.logarithms import LOG2_E
from paged_mla_optimized.kernels.common.scales import load_scales
from paged_mla_optimized.kernels.common.schedule import VARYING, Work
from paged_mla_optimized.kernels.common.segments import (
    Step,
    Tiles,
    find_segment,
    program_work_range,
    tile_of_visit,
)
from paged_mla_optimized.kernels.common.token_head import Answers, Lines, Partials, line_at
from paged_mla_optimized.kernels.hopper.async_rows import copy_queries
from paged_mla_optimized.kernels.hopper.halves import copy_half
from paged_mla_optimized.kernels.hopper.keys import (
    Geometry,
    Keys,
    ScaleFormat,
    Scales,
    arrivals,
    block_of_key,
    clear_tail,
    first_row,
    stage_behind,
    table_of_row,
)
from paged_mla_optimized.kernels.hopper.pairs import (
    partial_pairs,
    query_pairs,
    sees,
    state_pairs,
    state_stored,
    taken_pairs,
)
from paged_mla_optimized.kernels.hopper.softmax import (
    FLOOR,
    answer_factor,
    answer_lse,
    begin_weighing,
    higher,
    leave_weighing,
    own_sums,
    raise_peaks_pairwise,
    store_lse,
)
from paged_mla_optimized.triton_compat.gluon_names import read_as

_SLOTS = gl.constexpr(5)
# Offsets of the barriers in their array: four barriers for each slot, then two single ones.
_FULL = gl.constexpr(0)
_WEIGHED = gl.constexpr(_SLOTS.value)
_GO = gl.constexpr(2 * _SLOTS.value)
_LEFT = gl.constexpr(3 * _SLOTS.value)
_SUMMED = gl.constexpr(4 * _SLOTS.value)  # the factors of the outputs are stored
_READ = gl.constexpr(4 * _SLOTS.value + 1)  # both halves have read these factors
_BARS = gl.constexpr(4 * _SLOTS.value + 2)

# Weights are at most 1.75 * 2 ** 8 = 448. Weights of at least 2 ** -6 are normal e4m3 numbers.
_LIFT = gl.constexpr(4.0)  # log2 of the highest weight when the peak is set
_LAZY = gl.constexpr(4.0)  # how far, in log2, later weights may exceed it before the peak rises

_TINY = gl.constexpr(2.0**-126)  # a scale of 0 times a masked score of -inf would be NaN
_LEAST = gl.constexpr(2.0**-90)  # smaller scales of keys count as this for the weights of values
_E4M3 = gl.constexpr(gl.float8e4nv)
_CKV = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))  # the same bytes as with 16-bit elements
_K_PE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))
_PRODUCT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
_VALUES = gl.constexpr(gl.DotOperandLayout(0, _PRODUCT, 4))
_KEYS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
_VALUE_WORDS = gl.constexpr(
    gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]), 2)
)


class _Staged(NamedTuple):
    """The shared memory of all roles."""

    ckv: gl.shared_memory_descriptor  # int16 [_SLOTS, 64, 256]
    k_pe: gl.shared_memory_descriptor  # int16 [_SLOTS, 64, 32]; later the weights
    key_scales: gl.shared_memory_descriptor  # float32 [3 * _SLOTS, 64], see ``_publish_key_scales``
    keeps: gl.shared_memory_descriptor  # float32 [_SLOTS, 64]: factors of the sums so far
    sums: gl.shared_memory_descriptor  # float32 [64]: factors of the outputs
    q: gl.shared_memory_descriptor  # int16 [64, 256]
    q_pe: gl.shared_memory_descriptor  # int16 [64, 32]
    bars: gl.shared_memory_descriptor  # int64 [_BARS, 1]


class _Queries(NamedTuple):
    """A query tile as operands."""

    first: gl.tensor  # [64, 256], in registers; the other columns do not fit in registers
    all: gl.shared_memory_descriptor  # [64, 512]
    pe: gl.shared_memory_descriptor  # [64, 64]


@gluon.jit
def _regroup(x, ROWS: gl.constexpr):
    """Return `x` [ROWS, 64] with the 16 keys of each group reordered.

    The keys that a thread holds of 16-bit elements become neighbors.
    """
    return x.reshape([ROWS, 4, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS, 64])


@gluon.jit
def _columns(words):
    """Return the even and the odd columns of int16 `words`, which hold two columns each.

    The keys come in fours.
    """
    return gl.inline_asm_elementwise(
        "{ prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531; }", "=r,=r,r,r", [words],
        dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _rounded(weights):
    """Return positive `weights`, rounded to the three bits of mantissa of e4m3.

    The function rounds with integers, because ptxas 12.8 confuses e4m3 values that are used twice.
    """
    bits = weights.to(gl.int32, bitcast=True)
    return ((bits + 0x80000) & -0x100000).to(gl.float32, bitcast=True)


@gluon.jit
def _lifts(layout: gl.constexpr):
    """Return the lift [64] of each pair of a tile: log2 of the factor of its weights.

    Neighboring heads often have similar weights. With different lifts their weights are at
    different places between two e4m3 numbers, so that they are not all rounded in the same
    direction. The factor is an e4m3 number, so that weights that are powers of two stay exact.
    """
    eighths = gl.arange(0, 64, layout=layout) % 7
    return _LIFT + gl.log2(1.0 + eighths.to(gl.float32) * 0.125)


@gluon.jit
def _masked(step, segment, s, first):
    """Return the scores of keys from `first` on, with -inf for keys that a query does not see.

    Keys are counted from the first key of a thread, so that they are constants, not registers.
    """
    eights = s.reshape([64, 8, 8])
    layout: gl.constexpr = eights.type.layout
    own = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * 8
    pairs = query_pairs(step, segment, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    begin = first + own[None, None, :]
    visible = sees(
        step, key[None, :, None], segment.seq_len - begin, segment.context_len - begin,
        pairs.index[:, None, None], pairs.token[:, None, None], pairs.live[:, None, None],
    )  # fmt: skip
    return gl.convert_layout(gl.where(visible, eights, float("-inf")).reshape([64, 64]), _PRODUCT)


@gluon.jit
def _weigh_tiles(
    step, segment, peak, totals, q, staged, slot, phase, scale, SCALES: gl.constexpr,
    BOX: gl.constexpr,
):  # fmt: skip
    """Store the rounded weights of the key tiles of a segment.

    Returns
    -------
    peak : [64]
    totals : two tensors [64, 4]
        Own sums of rounded weights, which divide the outputs, and of exact weights, for the lse. If
        many keys have the same weight, rounding changes all of them in the same direction.
    slot, phase
        Position in the ring after these tiles.
    """
    bars = staged.bars
    key_scales = staged.key_scales
    pair_layout: gl.constexpr = peak.type.layout
    lifts = _lifts(pair_layout)
    key_layout: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    total = totals[0]
    exact_total = totals[1]
    own_layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        if BOX == 0:  # threads copied the tile, and the tensor cores (async proxy) read it
            fence_async_shared()
        keys = read_as(staged.ckv.index(slot), _E4M3, [64, 512], _CKV).permute((1, 0))
        k_pe = read_as(staged.k_pe.index(slot), _E4M3, [64, 64], _K_PE)
        s = gl.zeros([64, 64], gl.float32, _PRODUCT)
        s = warpgroup_mma(q.first, keys.slice(0, 256, dim=0), s, use_acc=False, is_async=True)
        s = warpgroup_mma(
            q.all.slice(256, 256, dim=1), keys.slice(256, 256, dim=0), s, is_async=True
        )
        s = warpgroup_mma(q.pe, k_pe.permute((1, 0)), s, is_async=True)
        peak = warpgroup_mma_wait(3, deps=[peak])  # returns once the last product is queued
        mbarrier.arrive(bars.index(_GO + slot))
        s = warpgroup_mma_wait(0, deps=[s])
        if SCALES != "scalar":  # now the exponents of the weights of values, which include scales
            s = s * key_scales.index(3 * slot).load(key_layout)[None, :] * scale[:, None]
            s += key_scales.index(3 * slot + 1).load(key_layout)[None, :]
        if tile >= segment.tile_edge:
            s = _masked(step, segment, s, tile * 64)
        highest = gl.reduce(s, 1, higher)
        if SCALES == "scalar":
            highest *= scale
        new_peak = raise_peaks_pairwise(peak, highest, (highest <= peak + _LAZY) == 0)
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        power = s * scale[:, None] if SCALES == "scalar" else s
        exact_weights = gl.exp2(power - (peak - lifts)[:, None])
        weights = _rounded(exact_weights)
        unscaled = weights
        if SCALES != "scalar":
            reciprocals = key_scales.index(3 * slot + 2).load(key_layout)[None, :]
            unscaled *= reciprocals
            exact_weights *= reciprocals
        kept = gl.convert_layout(keep, own_layout)[:, None]
        total = total * kept + own_sums(unscaled)
        exact_total = exact_total * kept + own_sums(exact_weights)
        k_pe.store(_regroup(weights, 64).to(_E4M3))
        staged.keeps.index(slot).store(keep)
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        phase = gl.where(slot == _SLOTS - 1, phase ^ 1, phase)
        slot = gl.where(slot == _SLOTS - 1, 0, slot + 1)
    return peak, (total, exact_total), slot, phase


@gluon.jit
def _publish_row_sums(peak, total, exact_total, cache_scale, staged, odd):
    """Store the factors of the outputs [64] for both halves; return the lse."""
    is_empty = (total == 0.0) & (peak == FLOOR)  # false if a score is infinite
    mbarrier.wait(staged.bars.index(_READ), odd ^ 1)  # the factors of the segment before are read
    staged.sums.store(answer_factor(is_empty, total, cache_scale))
    mbarrier.arrive(staged.bars.index(_SUMMED))
    pair_layout: gl.constexpr = peak.type.layout
    return answer_lse(is_empty, peak - _lifts(pair_layout), exact_total)


@gluon.jit
def _weigh(step, lines, q_scale_ptr, scales, answers, staged, softmax_scale, BOX: gl.constexpr):
    """Compute the weights of every tile of every segment, and the lse: the first warp group."""
    pair_layout: gl.constexpr = gl.SliceLayout(1, _PRODUCT)
    q = read_as(staged.q, _E4M3, [64, 512], _CKV)
    q_pe = read_as(staged.q_pe, _E4M3, [64, 64], _K_PE)
    cache_scale = gl.load(scales.ptr) if scales.SCALES == "scalar" else 1.0
    unit, end, row = program_work_range(step)
    slot = 0
    phase = 0
    odd = 0
    gdc_wait()  # for the queries
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        copy_queries(step, segment, lines, staged.q, 0, 256)
        copy_queries(step, segment, lines, staged.q_pe, 256, 32)
        async_copy.commit_group()
        pairs = query_pairs(step, segment, pair_layout)
        at = pairs.token * step.num_heads + pairs.head
        q_scale = gl.load(q_scale_ptr + at, mask=pairs.live, other=1.0)
        scale = q_scale * (cache_scale * softmax_scale * LOG2_E) + _TINY
        async_copy.wait_group(0)
        fence_async_shared()
        operands = _Queries(q.slice(0, 256, dim=1).load(_VALUES), q, q_pe)

        peak, totals = begin_weighing(step, segment, answers, _PRODUCT, 2)
        peak, totals, slot, phase = _weigh_tiles(
            step, segment, peak, totals, operands, staged, slot, phase, scale, scales.SCALES, BOX
        )
        total = gl.convert_layout(gl.sum(totals[0], 1), pair_layout)
        exact_total = gl.convert_layout(gl.sum(totals[1], 1), pair_layout)
        lse = _publish_row_sums(peak, total, exact_total, cache_scale, staged, odd)
        odd ^= 1
        if step.FIXED_SPLITS > 0 and segment.suspends:
            leave_weighing(step, peak, totals, answers)
        else:
            store_lse(step, segment, lse, answers, pair_layout)
        unit = segment.next_unit


@gluon.jit
def _blocks_of_keys(keys, table_row_ptr, tile, seq_len):
    """Return the block of each key [64] of a tile, int64; see ``block_of_key``."""
    key = tile * 64 + gl.arange(0, 64, layout=_KEYS)
    return block_of_key(keys, table_row_ptr, key, seq_len).to(gl.int64)


@gluon.jit
def _scales_of_keys(keys, scales, blocks, tile):
    """Return the scale of each key [64] of a tile; 1 for keys in no block."""
    key = tile * 64 + gl.arange(0, 64, layout=_KEYS)
    return load_scales(
        scales.ptr, blocks, key % keys.block_size, scales.stride_block, keys.block_size,
        blocks < keys.num_blocks, scales.SCALES,
    )  # fmt: skip


@gluon.jit
def _publish_key_scales(scale, staged, slot, is_wanted):
    """Store the scales of a tile's keys, their logarithms and their reciprocals.

    The logarithms and reciprocals are those of the scale, or of _LEAST for smaller magnitudes.
    """
    counted = gl.where(gl.abs(scale) < _LEAST, _LEAST, scale)  # log2 of a negative scale is NaN
    staged.key_scales.index(3 * slot).store(scale)
    staged.key_scales.index(3 * slot + 1).store(gl.log2(counted))
    staged.key_scales.index(3 * slot + 2).store(1.0 / counted)
    mbarrier.arrive(staged.bars.index(_FULL + slot), pred=is_wanted)


@gluon.jit
def _sum_tiles(
    step, segment, even, odd, keys, scales, staged, table_row_ptr, slot, phase, HALF: gl.constexpr
):
    """Add the weighted values of a segment's key tiles to the sums; refill the ring.

    Returns the sums [128, 64] of even and of odd columns, and the position in the ring.
    """
    pair_layout: gl.constexpr = gl.SliceLayout(0, _PRODUCT)
    all_pairs: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp loads all pairs
    hands_scales: gl.constexpr = scales.SCALES != "scalar" and HALF == 0
    bars = staged.bars
    seq_len = segment.seq_len
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        ahead = tile_of_visit(step, segment, visit + _SLOTS)
        at = first_row(keys, table_row_ptr, ahead, seq_len, 64)
        if hands_scales:
            blocks = _blocks_of_keys(keys, table_row_ptr, ahead, seq_len)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        values = staged.ckv.index(slot).slice(128 * HALF, 128, dim=1)
        if keys.BOX > 0 and tile * 64 + 64 > seq_len:
            clear_tail(values, seq_len - tile * 64, 64, 128, 4)
            fence_async_shared()
        words = _regroup(values.permute((1, 0)).load(_VALUE_WORDS), 128)
        values_even, values_odd = _columns(gl.convert_layout(words, _VALUES, assert_trivial=True))
        mbarrier.wait(bars.index(_WEIGHED + slot), phase)
        if hands_scales:
            scale = _scales_of_keys(keys, scales, blocks, ahead)
        keep_bits = staged.keeps.index(slot).load(all_pairs).to(gl.int32, bitcast=True)
        if gl.min(keep_bits, 0) < 0x3F800000:  # 1.0; positive numbers compare like their bits
            keep = staged.keeps.index(slot).load(pair_layout)
            even = even * keep[None, :]
            odd = odd * keep[None, :]
        next_slot, next_phase = stage_behind(slot, phase, _SLOTS)
        mbarrier.wait(bars.index(_GO + next_slot), next_phase, pred=visit + 1 < segment.tile_end)
        weights = read_as(staged.k_pe.index(slot), _E4M3, [64, 64], _K_PE).permute((1, 0))
        even = warpgroup_mma(values_even, weights, even, is_async=True)
        odd = warpgroup_mma(values_odd, weights, odd, is_async=True)
        even, odd = warpgroup_mma_wait(0, deps=[even, odd])
        if HALF == 0:
            mbarrier.arrive(bars.index(_LEFT + slot))
        else:
            mbarrier.wait(bars.index(_LEFT + slot), phase)
        if visit + _SLOTS < segment.tile_end:
            copy_half(keys, staged, slot, at, table_row_ptr, ahead, seq_len, HALF)
            if hands_scales:
                _publish_key_scales(scale, staged, slot, True)
        slot = next_slot
        phase = next_phase
    return even, odd, slot, phase


@gluon.jit
def _begin_scales(step, segment, keys, scales, staged, table_row_ptr, slot):
    """Store the scales of a segment's first key tiles; all loads start before the first wait."""
    loaded = ()
    for ahead in gl.static_range(_SLOTS):
        tile = tile_of_visit(step, segment, segment.tile_begin + ahead)
        blocks = _blocks_of_keys(keys, table_row_ptr, tile, segment.seq_len)
        loaded += (_scales_of_keys(keys, scales, blocks, tile),)
    for ahead in gl.static_range(_SLOTS):
        target = gl.where(slot + ahead >= _SLOTS, slot + ahead - _SLOTS, slot + ahead)
        is_wanted = segment.tile_begin + ahead < segment.tile_end
        _publish_key_scales(loaded[ahead], staged, target, is_wanted)


@gluon.jit
def _begin_tiles(step, segment, keys, scales, staged, table_row_ptr, slot, HALF: gl.constexpr):
    """Start to copy this half of the first key tiles of a segment, and store their scales."""
    tile_begin = segment.tile_begin
    target = slot
    for visit in range(tile_begin, gl.minimum(tile_begin + _SLOTS, segment.tile_end)):
        tile = tile_of_visit(step, segment, visit)
        at = first_row(keys, table_row_ptr, tile, segment.seq_len, 64)
        copy_half(keys, staged, target, at, table_row_ptr, tile, segment.seq_len, HALF)
        target = gl.where(target == _SLOTS - 1, 0, target + 1)
    if scales.SCALES != "scalar" and HALF == 0:
        _begin_scales(step, segment, keys, scales, staged, table_row_ptr, slot)


@gluon.jit
def _factor(staged, parity):
    """Wait for the factors of the outputs of a query tile, and return them, [1, 64]."""
    mbarrier.wait(staged.bars.index(_SUMMED), parity)
    factor = staged.sums.load(gl.SliceLayout(0, _PRODUCT))[None, :]
    mbarrier.arrive(staged.bars.index(_READ))
    return factor


@gluon.jit
def _state_at(pairs, HALF: gl.constexpr):
    """Return the offsets of the even columns [128, 64] of one half in a state of `pairs` [64]."""
    couple = gl.arange(0, 128, layout=gl.SliceLayout(1, _PRODUCT))
    return pairs[None, :] * 512 + 256 * HALF + couple[:, None] * 2


@gluon.jit
def _begin_summing(step, segment, answers, HALF: gl.constexpr):
    """Return the first sums [128, 64] of even and of odd columns: zeros, or those of a state."""
    even = gl.zeros([128, 64], gl.float32, _PRODUCT)
    odd = gl.zeros([128, 64], gl.float32, _PRODUCT)
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            pairs = taken_pairs(step, 1 + HALF, gl.SliceLayout(0, _PRODUCT))
            even_at = answers.partial_out_ptr + _state_at(pairs, HALF)
            even = gl.load(even_at)
            odd = gl.load(even_at + 1)
    return even, odd


@gluon.jit
def _store_columns(columns, base_ptr, at, live, HALF: gl.constexpr):
    """Store columns [128, 64, 2] of outputs; those of a pair start at offset `at`."""
    columns_layout: gl.constexpr = gl.SliceLayout(1, columns.type.layout)
    couple = gl.arange(0, 128, layout=gl.SliceLayout(1, columns_layout))
    parity = gl.arange(0, 2, layout=gl.SliceLayout(0, columns_layout))
    column = 256 * HALF + couple[:, None] * 2 + parity[None, :]
    ptrs = base_ptr + at[None, :, None] + column.expand_dims(1)
    gl.store(ptrs, columns.to(base_ptr.dtype.element_ty), mask=live[None, :, None])


@gluon.jit
def _store_answers(step, segment, even, odd, factor, answers, HALF: gl.constexpr):
    """Store half of the outputs of a query tile, or of its partial result."""
    columns = gl.join(even * factor, odd * factor)
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, columns.type.layout))
    partial = partial_pairs(step, segment, layout)
    pairs = query_pairs(step, segment, layout)
    if segment.is_whole:
        at = line_at(answers.out, pairs.token, pairs.head)
        _store_columns(columns, answers.out.ptr, at, pairs.live, HALF)
    else:
        _store_columns(columns, answers.partial_out_ptr, partial * 512, pairs.live, HALF)


@gluon.jit
def _answer(step, keys, scales, answers, staged, HALF: gl.constexpr):
    """Compute half of the latent columns of every segment; refill this half of the ring.

    This is the role of the second and the third warp group; HALF 0 is the left half, which also
    loads the scales of keys.
    """
    unit, end, row = program_work_range(step)
    slot = 0
    phase = 0
    parity = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        table_row_ptr = table_of_row(keys, row)
        _begin_tiles(step, segment, keys, scales, staged, table_row_ptr, slot, HALF)
        even, odd = _begin_summing(step, segment, answers, HALF)
        even, odd, slot, phase = _sum_tiles(
            step, segment, even, odd, keys, scales, staged, table_row_ptr, slot, phase, HALF
        )
        factor = _factor(staged, parity)
        parity ^= 1
        if step.FIXED_SPLITS > 0 and segment.suspends:
            pairs = state_pairs(gl.program_id(0), 64, gl.SliceLayout(0, _PRODUCT))
            even_at = answers.partial_out_ptr + _state_at(pairs, HALF)
            gl.store(even_at, even)
            gl.store(even_at + 1, odd)
            state_stored(step, 1 + HALF)
        else:
            _store_answers(step, segment, even, odd, factor, answers, HALF)
        unit = segment.next_unit


@gluon.jit
def _decode(step, keys, lines, q_scale_ptr, scales, answers, softmax_scale):
    """Allocate shared memory, initialize the barriers, and start the roles."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(gl.int16, [_SLOTS, 64, 256], keys.ckv_desc.layout)
    k_pe = gl.allocate_shared_memory(gl.int16, [_SLOTS, 64, 32], keys.k_pe_desc.layout)
    q = gl.allocate_shared_memory(gl.int16, [64, 256], keys.ckv_desc.layout)
    q_pe = gl.allocate_shared_memory(gl.int16, [64, 32], keys.k_pe_desc.layout)
    if scales.SCALES == "scalar":
        key_scales: gl.constexpr = None
    else:
        key_scales = gl.allocate_shared_memory(gl.float32, [_SLOTS * 3, 64], flat)
    keeps = gl.allocate_shared_memory(gl.float32, [_SLOTS, 64], flat)
    sums = gl.allocate_shared_memory(gl.float32, [64], flat)
    bars = gl.allocate_shared_memory(gl.int64, [_BARS, 1], mbarrier.MBarrierLayout())
    staged = _Staged(ckv, k_pe, key_scales, keeps, sums, q, q_pe, bars)
    loads: gl.constexpr = 2 * arrivals(keys.BOX) + (scales.SCALES != "scalar")
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(bars.index(_FULL + slot), count=loads)
    for bar in gl.static_range(_SLOTS, _BARS - 1):
        mbarrier.init(bars.index(bar), count=1)
    mbarrier.init(bars.index(_READ), count=2)
    fence_async_shared()
    gdc_launch_dependents()  # only the launch that quantizes queries may still run (quantize.py)
    gl.warp_specialize(
        [
            (
                _weigh,
                (step, lines, q_scale_ptr, scales, answers, staged, softmax_scale, keys.BOX),
            ),
            (_answer, (step, keys, scales, answers, staged, 0)),
            (_answer, (step, keys, scales, answers, staged, 1)),
        ],
        [4, 4],
        [192, 192],
    )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["scales_ptr"])
def decode_tile_fp8_kernel(
    work: Work,
    q_ptr,  # e4m3 [T, H, 512 + 64], as bytes
    q_scale_ptr,  # float32 [T, H]
    cache_ptr,  # e4m3 rows of 512 + 64, as bytes; read if no box fits
    scales_ptr,  # float32 [] or [num_blocks, 1, G]
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    num_blocks,
    out: Lines,  # [T, H, 512]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    partials: Partials,  # `out` is float32 with FIXED_SPLITS, otherwise of the type of outputs
    softmax_scale,
    ckv_desc,  # int16 [cache rows, 256 + 32], in boxes [BOX, 128]
    k_pe_desc,  # the same tensor, in boxes [BOX, 32]
    tiles: Tiles,
    geometry: Geometry,
    scale_format: ScaleFormat,
):
    words: gl.constexpr = gl.pointer_type(gl.int16)
    _decode(
        Step(*work, *tiles),
        Keys(
            cache_ptr.to(words), ckv_desc, k_pe_desc, block_table_ptr, stride_table_row,
            stride_table_col, num_blocks, *geometry,
        ),
        Lines(q_ptr.to(words), tiles.num_heads * 288, 288), q_scale_ptr,
        Scales(scales_ptr, *scale_format),
        Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials),
        softmax_scale,
    )  # fmt: skip
