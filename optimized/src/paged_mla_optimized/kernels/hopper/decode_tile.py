"""Split attention over 16-bit caches in tiles of 64 pairs on Hopper (rules S-4 to S-7, S-20).

The grid has a fixed number of programs. A program works on the segments of its share, one after
another (``schedule.py``). It stores `out` and `lse` of whole groups, and partial results of the
others, which ``combine.py`` joins. With FIXED_SPLITS it may wait for the state of another program
(``split_handoff.py``).

A program has three warp groups. The first (``_weigh``) holds the queries in registers, and computes
scores and softmax. Each of the two others (``_answer``) computes half of the latent columns of the
outputs, and copies its half of the keys into a ring of three slots. No warp only copies. ``PV`` of
one tile runs during the softmax of the next tile.

The items of the ring are the queries of a segment and then its key tiles, for each segment. Every
barrier of a slot completes once for every item, so that one phase bit serves all of them:

``full``     both halves of the tile are loaded; for queries: both halves of the slot are free
``weighed``  the weights of the tile are stored over its k_pe; for queries: they are in registers
``go``       ``QK`` of this item is issued, so that ``PV`` of the item before may start
``left``     the left half has read the weights

Two more barriers complete once for every segment: ``summed``, when the factors of the outputs are
stored, and with a rope ``turned``, when the right half has stored the rotated ``q_pe``. The right
half rotates it while the first keys of the segment are loaded.
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
    arrivals,
    clear_tail,
    first_row,
    next_stage,
    stage_behind,
    table_of_row,
)
from paged_mla_optimized.kernels.hopper.pairs import (
    kept_pairs,
    masked,
    partial_pairs,
    query_pairs,
    state_pairs,
    state_stored,
    taken_pairs,
)
from paged_mla_optimized.kernels.hopper.rope import Rope, RopeTables, load_q_pe, rotated
from paged_mla_optimized.kernels.hopper.softmax import (
    answer_factor,
    answer_lse,
    begin_weighing,
    leave_weighing,
    own_sums,
    raised_by_steps,
    store_lse,
)

_SLOTS = gl.constexpr(3)
# Offsets of the barriers in their array: four barriers for each slot, then two single ones.
_FULL = gl.constexpr(0)
_WEIGHED = gl.constexpr(_SLOTS.value)
_GO = gl.constexpr(2 * _SLOTS.value)
_LEFT = gl.constexpr(3 * _SLOTS.value)
_SUMMED = gl.constexpr(4 * _SLOTS.value)  # the factors of the outputs are stored
_TURNED = gl.constexpr(4 * _SLOTS.value + 1)  # the right half has rotated the queries
_BARS = gl.constexpr(4 * _SLOTS.value + 2)


class _Staged(NamedTuple):
    """The shared memory of all roles."""

    ckv: gl.shared_memory_descriptor  # [_SLOTS, 64, 512]
    k_pe: gl.shared_memory_descriptor  # [_SLOTS, 64, 64]; later the weights
    keeps: gl.shared_memory_descriptor  # bfloat16 [_SLOTS, 64]: factors of the sums so far
    sums: gl.shared_memory_descriptor  # float32 [64]: factors of the outputs
    q_pe: gl.shared_memory_descriptor  # [64, 64]
    q_last: gl.shared_memory_descriptor  # [64, 16]: the last latent columns of the queries
    bars: gl.shared_memory_descriptor  # int64 [_BARS, 1]


class _Queries(NamedTuple):
    """The latent columns of a query tile that are operands in registers; the rest does not fit."""

    q0: gl.tensor  # [64, 256]
    q1: gl.tensor  # [64, 128]
    q2: gl.tensor  # [64, 64]
    q3: gl.tensor  # [64, 32]
    q4: gl.tensor  # [64, 16]


@gluon.jit
def _highest(s):
    """Return the highest score of each line [64, 64].

    The reduction halves the line in each step, so that the chain of dependent instructions is
    short.
    """
    highest = s
    for halving in gl.static_range(3):
        highest = gl.max(highest.reshape([64, 2, 32 >> halving]), 1)
    return gl.convert_layout(gl.max(highest, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def _weigh_tiles(
    step, segment, peak, total, q, staged, slot, phase, scale, BOX: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Store the weights of the key tiles of a segment.

    Returns the peak [64] and the own sums [64, 4] after these tiles, and the position in the ring.
    """
    bars = staged.bars
    dtype: gl.constexpr = staged.ckv.dtype
    own_layout: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        mbarrier.wait(bars.index(_FULL + slot), phase)
        if BOX == 0:  # threads copied the tile, and the tensor cores (async proxy) read it
            fence_async_shared()
        keys = staged.ckv.index(slot)
        s = gl.zeros([64, 64], gl.float32, layout)
        s = warpgroup_mma(
            q.q0, keys.slice(0, 256, dim=1).permute((1, 0)), s, use_acc=False, is_async=True
        )
        s = warpgroup_mma(q.q1, keys.slice(256, 128, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q.q2, keys.slice(384, 64, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q.q3, keys.slice(448, 32, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(q.q4, keys.slice(480, 16, dim=1).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma(
            staged.q_last, keys.slice(496, 16, dim=1).permute((1, 0)), s, is_async=True
        )
        s = warpgroup_mma(staged.q_pe, staged.k_pe.index(slot).permute((1, 0)), s, is_async=True)
        peak = warpgroup_mma_wait(6, deps=[peak])  # returns once the last product is queued
        mbarrier.arrive(bars.index(_GO + slot))
        s = warpgroup_mma_wait(0, deps=[s])
        if tile >= segment.tile_edge:
            s = masked(step, segment, s, tile, 1)
        new_peak = raised_by_steps(peak, _highest(s), scale)
        keep = gl.exp2(peak - new_peak)
        weights = gl.exp2(s * scale - new_peak[:, None])
        total = total * gl.convert_layout(keep, own_layout)[:, None] + own_sums(weights)
        peak = new_peak
        staged.k_pe.index(slot).store(weights.to(dtype))
        staged.keeps.index(slot).store(keep.to(gl.bfloat16))
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        slot, phase = next_stage(slot, phase, _SLOTS)
    return peak, total, slot, phase


@gluon.jit
def _publish_row_sums(peak, total, staged):
    """Store the factors of the outputs [64] for both halves; return the lse."""
    is_empty = total == 0.0
    staged.sums.store(answer_factor(is_empty, total))
    mbarrier.arrive(staged.bars.index(_SUMMED))
    return answer_lse(is_empty, peak, total)


@gluon.jit
def _weigh(
    step, q_nope, q_pe, answers, staged, softmax_scale, BOX: gl.constexpr, ROPE: gl.constexpr
):
    """Compute the weights of every tile of every segment, and the lse: the first warp group."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    bars = staged.bars
    scale = softmax_scale * LOG2_E
    unit, end, row = program_work_range(step)
    slot = 0
    phase = 0
    odd = 0
    mbarrier.arrive(bars.index(_GO))
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        mbarrier.wait(bars.index(_FULL + slot), phase)
        lines = staged.ckv.index(slot)
        for first in gl.static_range(0, 512, 256):
            copy_queries(step, segment, q_nope, lines.slice(first, 256, dim=1), first, 256)
        copy_queries(step, segment, q_nope, staged.q_last, 496, 16)
        if ROPE == "none":
            copy_queries(step, segment, q_pe, staged.q_pe, 0, 64)
        async_copy.commit_group()
        async_copy.wait_group(0)
        # These take 124 registers a thread. With the other 20 (`q_last`, `q_pe`) in registers too,
        # the compiler would serialize the products.
        q = _Queries(
            lines.slice(0, 256, dim=1).load(operand),
            lines.slice(256, 128, dim=1).load(operand),
            lines.slice(384, 64, dim=1).load(operand),
            lines.slice(448, 32, dim=1).load(operand),
            lines.slice(480, 16, dim=1).load(operand),
        )
        fence_async_shared()
        mbarrier.arrive(bars.index(_WEIGHED + slot))
        slot, phase = next_stage(slot, phase, _SLOTS)
        if ROPE != "none":
            mbarrier.wait(bars.index(_TURNED), odd)
            odd ^= 1

        peak, totals = begin_weighing(step, segment, answers, layout, 1)
        peak, total, slot, phase = _weigh_tiles(
            step, segment, peak, totals[0], q, staged, slot, phase, scale, BOX, layout
        )
        mbarrier.arrive(bars.index(_GO + slot))
        # Both halves have read the factors of the segment before.
        mbarrier.wait(bars.index(_FULL + slot), phase)
        lse = _publish_row_sums(peak, gl.convert_layout(gl.sum(total, 1), pair_layout), staged)
        if step.FIXED_SPLITS > 0 and segment.suspends:
            leave_weighing(step, peak, (total,), answers)
        else:
            store_lse(step, segment, lse, answers, pair_layout)
        unit = segment.next_unit


@gluon.jit
def _begin_summing(step, segment, answers, column, HALF: gl.constexpr, layout: gl.constexpr):
    """Return the sums [64, 256] with which a segment starts: zeros, or those of a state."""
    acc = gl.zeros([64, 256], gl.float32, layout)
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            at = taken_pairs(step, 1 + HALF, gl.SliceLayout(1, layout))
            acc = gl.load(answers.partial_out_ptr + at[:, None] * 512 + column[None, :])
    return acc


@gluon.jit
def _sum_tiles(
    step, segment, acc, keys, staged, table_row_ptr, slot, phase, HALF: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Add the weighted values of a segment's key tiles to the sums [64, 256]; refill the ring.

    Returns the sums, and the position in the ring.
    """
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    all_pairs: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])  # every warp loads all pairs
    loads: gl.constexpr = arrivals(keys.BOX)  # arrivals of one half
    bars = staged.bars
    seq_len = segment.seq_len
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        ahead = tile_of_visit(step, segment, visit + _SLOTS)
        at = first_row(keys, table_row_ptr, ahead, seq_len, 64)
        mbarrier.wait(bars.index(_WEIGHED + slot), phase)
        if gl.min(staged.keeps.index(slot).load(all_pairs).to(gl.float32), 0) < 1.0:
            keep = staged.keeps.index(slot).load(pair_layout).to(gl.float32)
            acc = acc * keep[:, None]
        values = staged.ckv.index(slot).slice(256 * HALF, 256, dim=1)
        if keys.BOX == 0:
            fence_async_shared()
        elif tile * 64 + 64 > seq_len:
            clear_tail(values, seq_len - tile * 64, 64, 256, 4)
            fence_async_shared()
        next_slot, next_phase = stage_behind(slot, phase, _SLOTS)
        mbarrier.wait(bars.index(_GO + next_slot), next_phase)
        acc = warpgroup_mma(staged.k_pe.index(slot), values, acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        if HALF == 0:
            mbarrier.arrive(bars.index(_LEFT + slot))
        else:
            mbarrier.wait(bars.index(_LEFT + slot), phase)
        if visit + _SLOTS < segment.tile_end:
            copy_half(keys, staged, slot, at, table_row_ptr, ahead, seq_len, HALF)
        if visit + _SLOTS == segment.tile_end:
            mbarrier.arrive(bars.index(_FULL + slot), count=loads)
        slot = next_slot
        phase = next_phase
    return acc, slot, phase


@gluon.jit
def _store_answers(step, segment, acc, sums, column, answers, layout: gl.constexpr):
    """Store the columns [64, 256] of the outputs of a query tile, or of its partial result."""
    acc = acc * sums.load(layout)[:, None]
    if segment.is_whole:
        pairs = query_pairs(step, segment, layout)
        line = line_at(answers.out, pairs.token, pairs.head)
        out_at = answers.out.ptr + line[:, None] + column[None, :]
        gl.store(out_at, acc.to(answers.out.ptr.dtype.element_ty), mask=pairs.live[:, None])
    else:
        at = partial_pairs(step, segment, layout)
        partial_at = answers.partial_out_ptr + at[:, None] * 512 + column[None, :]
        kept = kept_pairs(step, segment, layout)
        gl.store(partial_at, acc, mask=kept[:, None])


@gluon.jit
def _answer(step, keys, q_pe, rope, answers, staged, HALF: gl.constexpr):
    """Compute half of the latent columns of every segment; refill this half of the ring.

    This is the role of the second and the third warp group; HALF 0 is the left half. With a rope
    the right half rotates the queries. The kernel would take up to 5 % longer if the left half
    rotated them, or the first warp group, whose loop has no free register.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    loads: gl.constexpr = arrivals(keys.BOX)  # arrivals of one half
    bars = staged.bars
    unit, end, row = program_work_range(step)
    slot = 0
    phase = 0
    odd = 0
    mbarrier.arrive(bars.index(_FULL), count=loads)
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        tile_begin = segment.tile_begin
        tile_end = segment.tile_end
        table_row_ptr = table_of_row(keys, row)
        q_slot = slot
        q_phase = phase
        slot, phase = stage_behind(q_slot, q_phase, _SLOTS)
        target = slot
        if HALF == 1:
            loaded = load_q_pe(step, segment, q_pe, rope, 64, 4)  # before the first keys
        for ahead in gl.static_range(_SLOTS):
            if ahead == _SLOTS - 1:  # this slot holds the queries until they are in registers
                if HALF == 1 and rope.ROPE != "none":
                    staged.q_pe.store(rotated(loaded, rope))
                    fence_async_shared()
                    mbarrier.arrive(bars.index(_TURNED))
                mbarrier.wait(bars.index(_WEIGHED + q_slot), q_phase)
                if HALF == 0:
                    mbarrier.arrive(bars.index(_LEFT + q_slot))
            if tile_begin + ahead < tile_end:
                tile = tile_of_visit(step, segment, tile_begin + ahead)
                at = first_row(keys, table_row_ptr, tile, segment.seq_len, 64)
                copy_half(keys, staged, target, at, table_row_ptr, tile, segment.seq_len, HALF)
            if tile_begin + ahead == gl.maximum(tile_end, tile_begin):
                mbarrier.arrive(bars.index(_FULL + target), count=loads)  # for the next queries
            target = gl.where(target == _SLOTS - 1, 0, target + 1)

        column = 256 * HALF + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
        acc = _begin_summing(step, segment, answers, column, HALF, layout)
        acc, slot, phase = _sum_tiles(
            step, segment, acc, keys, staged, table_row_ptr, slot, phase, HALF, layout
        )
        mbarrier.wait(bars.index(_SUMMED), odd)
        odd ^= 1
        if step.FIXED_SPLITS > 0 and segment.suspends:
            at = state_pairs(gl.program_id(0), 64, pair_layout)
            gl.store(answers.partial_out_ptr + at[:, None] * 512 + column[None, :], acc)
            state_stored(step, 1 + HALF)
        else:
            _store_answers(step, segment, acc, staged.sums, column, answers, pair_layout)
        unit = segment.next_unit


@gluon.jit
def _decode(step, keys, q_nope, q_pe, rope, answers, softmax_scale):
    """Allocate shared memory, initialize the barriers, and start the roles."""
    dtype: gl.constexpr = q_nope.ptr.dtype.element_ty
    rows_layout: gl.constexpr = keys.ckv_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(dtype, [_SLOTS, 64, 512], rows_layout)
    k_pe = gl.allocate_shared_memory(dtype, [_SLOTS, 64, 64], rows_layout)
    keeps = gl.allocate_shared_memory(gl.bfloat16, [_SLOTS, 64], flat)
    sums = gl.allocate_shared_memory(gl.float32, [64], flat)
    staged_pe = gl.allocate_shared_memory(dtype, [64, 64], rows_layout)
    staged_last = gl.allocate_shared_memory(dtype, [64, 16], gl.NVMMASharedLayout(32, 16, 2))
    bars = gl.allocate_shared_memory(gl.int64, [_BARS, 1], mbarrier.MBarrierLayout())
    staged = _Staged(ckv, k_pe, keeps, sums, staged_pe, staged_last, bars)
    for slot in gl.static_range(_SLOTS):
        mbarrier.init(bars.index(_FULL + slot), count=2 * arrivals(keys.BOX))
    for bar in gl.static_range(_SLOTS, _BARS):
        mbarrier.init(bars.index(bar), count=1)
    fence_async_shared()
    gdc_wait()  # this kernel starts before the step's earlier kernels end, and reads their results
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _weigh,
                (step, q_nope, q_pe, answers, staged, softmax_scale, keys.BOX, rope.ROPE),
            ),
            (_answer, (step, keys, q_pe, rope, answers, staged, 0)),
            (_answer, (step, keys, q_pe, rope, answers, staged, 1)),
        ],
        [4, 4],
        [160, 160],
    )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def decode_tile_kernel(
    work: Work,
    q_nope: Lines,  # [T, H, 512]
    q_pe: Lines,  # [T, H, 64]
    rope_tables: RopeTables,
    cache_ptr,  # rows of 512 + 64; read if no box fits
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    num_blocks,
    out: Lines,  # [T, H, 512]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    partials: Partials,
    softmax_scale,
    ckv_desc,  # [cache rows, 512 + 64], in boxes [BOX, 256]
    k_pe_desc,  # the same tensor, in boxes [BOX, 64]
    tiles: Tiles,
    geometry: Geometry,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
):
    _decode(
        Step(*work, *tiles),
        Keys(
            cache_ptr, ckv_desc, k_pe_desc, block_table_ptr, stride_table_row, stride_table_col,
            num_blocks, *geometry,
        ),
        q_nope, q_pe, Rope(*rope_tables, ROPE),
        Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials),
        softmax_scale,
    )  # fmt: skip
