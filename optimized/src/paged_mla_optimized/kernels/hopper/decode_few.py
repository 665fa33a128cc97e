"""Split attention over 16-bit caches for tiles of up to 32 pairs on Hopper (S-4 to S-7, S-20).

The kernel computes scores and outputs transposed, ``S^T = K Q^T`` and ``O^T = V^T P^T``. The 64
rows of a product are then keys or latent columns, so that no row is wasted if there are few
queries. Memory bandwidth limits the kernel.

The grid has a fixed number of programs. A program works on the segments of its share, one after
another (``schedule.py``). It stores `out` and `lse` of whole groups, and partial results of the
others, which ``combine.py`` joins. With FIXED_SPLITS it may wait for the state of another program
(``split_handoff.py``).

A program has two roles: four warps compute (``_attend``), and one warp, or four without boxes,
copies key tiles into a ring of STAGES stages (``copy_tiles``). The barrier ``ready`` of a stage
completes when its tile is loaded, and ``empty`` when the computing warps have read it.
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
from paged_mla_optimized.kernels.common.token_head import (
    Answers,
    Lines,
    Partials,
    line_at,
    line_ptr,
)
from paged_mla_optimized.kernels.hopper.async_rows import copy_queries
from paged_mla_optimized.kernels.hopper.keys import (
    Geometry,
    Keys,
    Ring,
    Scales,
    arrivals,
    clear_tail,
    copy_tiles,
    next_stage,
)
from paged_mla_optimized.kernels.hopper.pairs import (
    partial_pairs,
    query_pairs,
    state_pairs,
    state_stored,
    taken_pairs,
    without_unseen,
)
from paged_mla_optimized.kernels.hopper.rope import Rope, RopeTables, stage_q_pe
from paged_mla_optimized.kernels.hopper.softmax import (
    FLOOR,
    answer_factor,
    answer_lse,
    raised,
)


class _Staged(NamedTuple):
    """Queries and weights in shared memory."""

    q_nope: gl.shared_memory_descriptor  # [1, TILE_M, R]
    q_pe: gl.shared_memory_descriptor  # [1, TILE_M, 64]
    weights: gl.shared_memory_descriptor  # [1, TILE_N, TILE_M]


class _Axes(NamedTuple):
    """The indices along the first axis of scores, and along that of outputs."""

    key: gl.tensor  # [TILE_N]: key, counted in the tile
    column: gl.tensor  # [R]: latent column


@gluon.jit
def _store_partial(out, lse, axes, at, answers):
    """Store out [R, TILE_M] and lse of a query tile as partial result; `at` are its pairs."""
    R: gl.constexpr = out.shape[0]
    gl.store(answers.partial_out_ptr + at[None, :] * R + axes.column[:, None], out)
    gl.store(answers.partial_lse_ptr + at, lse)


@gluon.jit
def _store_state(acc, peak, sums, axes, answers):
    """Store the state of a split; another program continues from it."""
    R: gl.constexpr = acc.shape[0]
    TILE_M: gl.constexpr = peak.shape[0]
    pair_layout: gl.constexpr = peak.type.layout
    pair = state_pairs(gl.program_id(0), TILE_M, pair_layout)
    _store_partial(acc, peak, axes, pair, answers)
    sums_at = (pair + TILE_M)[None, :] * R + axes.key[:, None]
    gl.store(answers.partial_out_ptr + sums_at, sums)


@gluon.jit
def _begin(step, segment, axes, answers, layout: gl.constexpr):
    """Return the first accumulator [R, TILE_M], peak [TILE_M] and sums [TILE_N, TILE_M].

    They come from a state if the segment resumes one.
    """
    R: gl.constexpr = axes.column.shape[0]
    TILE_M: gl.constexpr = step.TILE_M
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    acc = gl.zeros([R, TILE_M], gl.float32, layout)
    peak = gl.full([TILE_M], FLOOR, gl.float32, pair_layout)
    sums = gl.zeros([step.TILE_N, TILE_M], gl.float32, layout)
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            pair = taken_pairs(step, 0, pair_layout)
            acc = gl.load(answers.partial_out_ptr + pair[None, :] * R + axes.column[:, None])
            peak = gl.load(answers.partial_lse_ptr + pair)
            sums_at = (pair + TILE_M)[None, :] * R + axes.key[:, None]
            sums = gl.load(answers.partial_out_ptr + sums_at)
    return acc, peak, sums


@gluon.jit
def _attend_tiles(
    step, segment, pairs, axes, acc, peak, sums, staged, ring, stage, phase, scale,
    BOX: gl.constexpr,
):  # fmt: skip
    """Return accumulator, peak and sums after the key tiles of a segment, and the ring's position.

    `acc`, `peak` and `sums` are the results of ``_begin``. `sums` are the sums of weights that each
    thread holds.
    """
    TILE_M: gl.constexpr = step.TILE_M
    TILE_N: gl.constexpr = step.TILE_N
    STAGES: gl.constexpr = ring.ready.shape[0]
    dtype: gl.constexpr = staged.weights.dtype
    s_layout: gl.constexpr = acc.type.layout
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        mbarrier.wait(ring.ready.index(stage), phase)
        if BOX == 0:  # threads copied the tile, and the tensor cores (async proxy) read it
            fence_async_shared()
        elif tile * TILE_N + TILE_N > segment.seq_len:
            valid = segment.seq_len - tile * TILE_N
            clear_tail(ring.ckv.index(stage), valid, TILE_N, acc.shape[0], 4)
            fence_async_shared()
        zero = stage >> 8  # 0; the compiler cannot know this, so it does not hoist the descriptors
        queries = staged.q_nope.index(zero).permute((1, 0))
        scores = gl.zeros([TILE_N, TILE_M], gl.float32, s_layout)
        keys = ring.ckv.index(stage)
        scores = warpgroup_mma(keys, queries, scores, use_acc=False, is_async=True)
        queries = staged.q_pe.index(zero).permute((1, 0))
        scores = warpgroup_mma(ring.k_pe.index(stage), queries, scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        if tile >= segment.tile_edge:
            key = tile * TILE_N + axes.key
            scores = without_unseen(step, segment, scores, key, pairs, 0)
        new_peak = raised(peak, gl.max(scores, 0) * scale)
        weights = gl.exp2(scores * scale - new_peak[None, :])
        staged.weights.index(0).store(weights.to(dtype))
        fence_async_shared()
        keep = gl.exp2(peak - new_peak)
        peak = new_peak
        if gl.min(keep, 0) < 1.0:
            acc = acc * keep[None, :]
            sums = sums * keep[None, :]
        sums += weights
        values = ring.ckv.index(stage).permute((1, 0))
        acc = warpgroup_mma(values, staged.weights.index(zero), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return acc, peak, sums, stage, phase


@gluon.jit
def _store_answers(step, segment, pairs, axes, acc, peak, sums, answers):
    """Store out and lse of a query tile, or its partial result."""
    pair_layout: gl.constexpr = peak.type.layout
    total = gl.sum(sums, 0)
    is_empty = total == 0.0
    out = acc * answer_factor(is_empty, total)[None, :]
    lse = answer_lse(is_empty, peak, total)
    if segment.is_whole:
        line = line_at(answers.out, pairs.token, pairs.head)
        out_at = answers.out.ptr + line[None, :] + axes.column[:, None]
        gl.store(out_at, out.to(answers.out.ptr.dtype.element_ty), mask=pairs.live[None, :])
        gl.store(line_ptr(answers.lse, pairs.token, pairs.head), lse, mask=pairs.live)
    else:
        _store_partial(out, lse, axes, partial_pairs(step, segment, pair_layout), answers)


@gluon.jit
def _attend(step, q_nope, q_pe, rope, answers, staged, ring, softmax_scale, BOX: gl.constexpr):
    """Compute the attention of every segment of this program; the role of the computing warps."""
    R: gl.constexpr = staged.q_nope.shape[2]
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, step.TILE_M, 16])
    axes = _Axes(
        gl.arange(0, step.TILE_N, layout=gl.SliceLayout(1, s_layout)),
        gl.arange(0, R, layout=gl.SliceLayout(1, s_layout)),
    )
    scale = softmax_scale * LOG2_E
    unit, end, row = program_work_range(step)
    stage = 0
    phase = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        copy_queries(step, segment, q_nope, staged.q_nope.index(0), 0, R)
        stage_q_pe(step, segment, q_pe, rope, staged.q_pe.index(0))
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        pairs = query_pairs(step, segment, gl.SliceLayout(0, s_layout))
        acc, peak, sums = _begin(step, segment, axes, answers, s_layout)
        acc, peak, sums, stage, phase = _attend_tiles(
            step, segment, pairs, axes, acc, peak, sums, staged, ring, stage, phase, scale, BOX
        )
        if step.FIXED_SPLITS > 0 and segment.suspends:
            _store_state(acc, peak, sums, axes, answers)
            state_stored(step, 0)
        else:
            _store_answers(step, segment, pairs, axes, acc, peak, sums, answers)
        unit = segment.next_unit


@gluon.jit
def _decode(
    step, keys, q_nope, q_pe, rope, answers, softmax_scale, R: gl.constexpr, STAGES: gl.constexpr
):
    """Allocate shared memory, initialize the barriers, and start the roles."""
    TILE_M: gl.constexpr = step.TILE_M
    TILE_N: gl.constexpr = step.TILE_N
    dtype: gl.constexpr = q_nope.ptr.dtype.element_ty
    rows_layout: gl.constexpr = keys.ckv_desc.layout
    narrow: gl.constexpr = gl.NVMMASharedLayout(TILE_M * 2, 16, 2)
    staged_nope = gl.allocate_shared_memory(dtype, [1, TILE_M, R], rows_layout)
    staged_pe = gl.allocate_shared_memory(dtype, [1, TILE_M, 64], rows_layout)
    ckv = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, R], rows_layout)
    k_pe = gl.allocate_shared_memory(dtype, [STAGES, TILE_N, 64], rows_layout)
    weights = gl.allocate_shared_memory(dtype, [1, TILE_N, TILE_M], narrow)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = _Staged(staged_nope, staged_pe, weights)
    ring = Ring(ckv, k_pe, None, ready, empty)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=arrivals(keys.BOX))
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    gdc_wait()  # this kernel starts before the step's earlier kernels end, and reads their results
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _attend,
                (step, q_nope, q_pe, rope, answers, staged, ring, softmax_scale, keys.BOX),
            ),
            (copy_tiles, (step, keys, Scales(None, None, "none", 0), ring, R)),
        ],
        [4 if keys.BOX == 0 else 1],
        [56],
    )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING)
def decode_few_kernel(
    work: Work,
    q_nope: Lines,  # [T, H, R]
    q_pe: Lines,  # [T, H, 64]
    rope_tables: RopeTables,
    cache_ptr,  # rows of R + 64; read if no box fits
    block_table_ptr,  # int32 [B, M]
    stride_table_row,
    stride_table_col,
    num_blocks,
    out: Lines,  # [T, H, R]
    lse_ptr,  # float32 [T, H]
    stride_lse_token,
    stride_lse_head,
    partials: Partials,
    softmax_scale,
    ckv_desc,  # [cache rows, R + 64], in boxes [BOX, R]
    k_pe_desc,  # the same tensor, in boxes [BOX, 64]
    tiles: Tiles,
    geometry: Geometry,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
    R: gl.constexpr,
    STAGES: gl.constexpr,
):
    _decode(
        Step(*work, *tiles),
        Keys(
            cache_ptr, ckv_desc, k_pe_desc, block_table_ptr, stride_table_row, stride_table_col,
            num_blocks, *geometry,
        ),
        q_nope, q_pe, Rope(*rope_tables, ROPE),
        Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials),
        softmax_scale, R, STAGES,
    )  # fmt: skip
