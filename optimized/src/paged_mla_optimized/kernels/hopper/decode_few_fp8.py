"""Split attention over e4m3 caches with 16-bit products on Hopper (S-4 to S-7, S-11, S-20).

The products are exact: they are products of float16, which represents e4m3 numbers exactly. The
kernel multiplies scores and weights by the scales of keys in float32. It multiplies the bfloat16
part of a row, if there is one, as bfloat16. If a row has a scale for each share of its latent, the
scores use all of these scales, and the weights include one key scale (``scale_groups.py``). The
values are multiplied by the ratio of their share's scale to it, and rounded to float16 as the
weights are.

As in ``decode_few.py`` the operands are swapped, ``S^T = K Q^T`` and ``O^T = V^T P^T``. Here the
keys of both products come from registers, so that no unpacked code is written to shared memory
(``e4m3.py``). Queries become float16 too (``queries.py``). More than 32 pairs use this kernel, in
tiles of 64, only if ``decode_tile_exact.py`` does not have enough shared memory for them.

The grid has a fixed number of programs. A program works on the segments of its share, one after
another (``schedule.py``). It stores `out` and `lse` of whole groups, and partial results of the
others, which ``combine.py`` joins. With FIXED_SPLITS it may wait for the state of another program
(``split_handoff.py``).

A program has two roles. Two warp groups compute (``_attend``). Each takes half of the keys of a
tile for scores, and half of the columns for outputs; they exchange weights through shared memory.
One warp, or four without boxes, copies key tiles into a ring of STAGES stages (``copy_tiles``). The
barrier ``ready`` of a stage completes when its tile is loaded, and ``empty`` when it has been read.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
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
from paged_mla_optimized.kernels.common.token_head import Answers, Lines, Partials
from paged_mla_optimized.kernels.hopper.answers import store_answers
from paged_mla_optimized.kernels.hopper.e4m3 import contracted, value_words, values_of
from paged_mla_optimized.kernels.hopper.keys import (
    Geometry,
    Keys,
    Ring,
    ScaleFormat,
    Scales,
    clear_tail,
    copy_tiles,
    next_stage,
    tile_arrivals,
)
from paged_mla_optimized.kernels.hopper.pairs import (
    masked,
    state_pairs,
    state_stored,
    taken_pairs,
)
from paged_mla_optimized.kernels.hopper.queries import (
    load_query_tile,
    lowered,
    power_of,
    store_halves,
    store_pieces,
)
from paged_mla_optimized.kernels.hopper.rope import Rope, RopeTables
from paged_mla_optimized.kernels.hopper.scale_groups import key_scale_of, load_scales, store_ratios
from paged_mla_optimized.kernels.hopper.softmax import (
    FLOOR,
    LAZY,
    answer_factor,
    answer_lse,
    lift_of,
    raised,
)
from paged_mla_optimized.triton_compat.gluon_names import read_as, thread_barrier

_WARPS = gl.constexpr(8)


class _Staged(NamedTuple):
    """Queries and weights in shared memory."""

    q_nope: gl.shared_memory_descriptor  # float16 [2, TILE_M, R / 2]; later the outputs
    q_pe: gl.shared_memory_descriptor  # float16 [2, TILE_M, P / 2] or bfloat16 [pieces, TILE_M, P]
    scales: gl.shared_memory_descriptor  # float32 [TILE_M]: scales of the scores
    peaks: gl.shared_memory_descriptor  # float32 [TILE_M]
    weights: gl.shared_memory_descriptor  # float16 [TILE_N, TILE_M]
    ratios: gl.shared_memory_descriptor  # float16 [SHARES, TILE_N] (``scale_groups.py``), or None
    exceeds: gl.shared_memory_descriptor  # int32 [_WARPS]: whether a peak must rise


@gluon.jit
def _stage_queries(
    step, segment, q_nope, q_pe, rope, staged, empty, is_first, scale, R: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Store a query tile as float16, the scales of its scores, and the initial peaks.

    The scale of a pair is `scale` divided by the power of two that multiplies its queries. After
    the loads of the program's first queries are issued, the function frees all stages of the ring
    except the first.
    """
    nope, pe = load_query_tile(step, segment, q_nope, q_pe, rope, R, P, _WARPS)
    STAGES: gl.constexpr = empty.shape[0]
    for stage in gl.static_range(1, STAGES):
        mbarrier.arrive(empty.index(stage), pred=is_first)
    power = power_of(nope, pe)
    store_halves(nope, power, staged.q_nope, 0)
    if staged.q_pe.dtype == gl.float16:
        store_halves(pe, power, staged.q_pe, 0)
    else:
        store_pieces(pe, power, staged.q_pe)
    scales = lowered(scale, power)
    staged.scales.store(scales)
    staged.peaks.store(gl.full_like(scales, FLOOR))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _own_sum(weights):
    """Return `weights` [keys, pairs] with the two keys that a thread holds of each pair added.

    The result takes half of the registers.
    """
    KEYS: gl.constexpr = weights.shape[0]
    PAIRS: gl.constexpr = weights.shape[1]
    return gl.sum(weights.reshape([KEYS // 16, 2, 8, PAIRS]), 1)


@gluon.jit
def _by_warp(scores):
    """Return scores [keys, pairs] as [warps, scores of a warp]; this moves no data."""
    KEYS: gl.constexpr = scores.shape[0]
    PAIRS: gl.constexpr = scores.shape[1]
    ALONG: gl.constexpr = min(_WARPS, KEYS // 16)
    ACROSS: gl.constexpr = _WARPS // ALONG
    scores = scores.reshape([ALONG, KEYS // ALONG, ACROSS, PAIRS // ACROSS]).permute((0, 2, 1, 3))
    return scores.reshape([_WARPS, KEYS * PAIRS // _WARPS])


@gluon.jit
def _scores(staged, keys, k_pe, zero, s_layout: gl.constexpr):
    """Return the scores [keys, pairs] of a tile of codes, without any scale."""
    q_nope = staged.q_nope
    q_pe = staged.q_pe
    TILE_N: gl.constexpr = keys.shape[0]
    WIDTH: gl.constexpr = keys.shape[1]
    PAIRS: gl.constexpr = q_nope.shape[1]
    COLUMNS: gl.constexpr = 64  # pairs of columns at a time
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    # Words are loaded one chunk before they are unpacked. Products read their registers while they
    # run, so the registers of the last two products are kept until these are done.
    words = k_pe.load(operand)
    following = keys.slice(0, COLUMNS, dim=1).load(operand)
    last_left, last_right = contracted(words)
    s = gl.zeros([TILE_N, PAIRS], gl.float32, s_layout)
    queries = q_pe.index(zero).permute((1, 0))
    s = warpgroup_mma(last_left, queries, s, use_acc=False, is_async=True)
    queries = q_pe.index(zero + 1).permute((1, 0))
    s = warpgroup_mma(last_right, queries, s, is_async=True)
    for first in gl.static_range(0, WIDTH, COLUMNS):
        left, right = contracted(following)
        if first + COLUMNS < WIDTH:
            following = keys.slice(first + COLUMNS, COLUMNS, dim=1).load(operand)
        queries = q_nope.index(zero).slice(first, COLUMNS, dim=1)
        s = warpgroup_mma(left, queries.permute((1, 0)), s, is_async=True)
        queries = q_nope.index(zero + 1).slice(first, COLUMNS, dim=1)
        s = warpgroup_mma(right, queries.permute((1, 0)), s, is_async=True)
        last_left, last_right = warpgroup_mma_wait(2, deps=[last_left, last_right])
        last_left = left
        last_right = right
    s, last_left, last_right = warpgroup_mma_wait(0, deps=[s, last_left, last_right])
    return s


@gluon.jit
def _scores_of_shares(staged, keys, k_pe, key_scales, first_scales, zero, s_layout: gl.constexpr):
    """Return the scores [keys, pairs] of a tile whose rows have a scale for each share.

    The scores include the scales of the keys.
    """
    q_nope = staged.q_nope
    q_pe = staged.q_pe
    SHARES: gl.constexpr = staged.ratios.shape[0]
    TILE_N: gl.constexpr = keys.shape[0]
    WIDTH: gl.constexpr = keys.shape[1]
    PAIRS: gl.constexpr = q_nope.shape[1]
    P: gl.constexpr = k_pe.shape[1]
    PIECES: gl.constexpr = q_pe.shape[0]
    COLUMNS: gl.constexpr = 64 if PAIRS < 64 else 16  # pairs of columns at a time; few registers
    WORDS: gl.constexpr = WIDTH // SHARES
    operand: gl.constexpr = gl.DotOperandLayout(0, s_layout, 2)
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    following = keys.slice(0, COLUMNS, dim=1).load(operand)
    s = gl.zeros([TILE_N, PAIRS], gl.float32, s_layout)
    share = s
    k_pe = read_as(k_pe, gl.bfloat16, [TILE_N, P], k_pe.layout)
    for piece in gl.static_range(PIECES):
        queries = q_pe.index(zero + piece).permute((1, 0))
        s = warpgroup_mma(k_pe, queries, s, use_acc=piece > 0, is_async=True)
    for first in gl.static_range(0, WIDTH, COLUMNS):
        left, right = contracted(following)
        if first + COLUMNS < WIDTH:
            following = keys.slice(first + COLUMNS, COLUMNS, dim=1).load(operand)
        if first == 0:
            last_left = left
            last_right = right
        elif first % WORDS == 0:
            s, share, last_left, last_right, left, right = warpgroup_mma_wait(
                0, deps=[s, share, last_left, last_right, left, right]
            )
            scale = key_scales.index(first_scales + first // WORDS - 1).load(key_layout)
            s += share * scale[:, None]
        queries = q_nope.index(zero).slice(first, COLUMNS, dim=1).permute((1, 0))
        share = warpgroup_mma(left, queries, share, use_acc=first % WORDS > 0, is_async=True)
        queries = q_nope.index(zero + 1).slice(first, COLUMNS, dim=1).permute((1, 0))
        share = warpgroup_mma(right, queries, share, is_async=True)
        if first % WORDS > 0:
            last_left, last_right = warpgroup_mma_wait(2, deps=[last_left, last_right])
        last_left = left
        last_right = right
    s, share, last_left, last_right = warpgroup_mma_wait(0, deps=[s, share, last_left, last_right])
    scale = key_scales.index(first_scales + SHARES - 1).load(key_layout)
    return s + share * scale[:, None]


@gluon.jit
def _load_values(keys, AT: gl.constexpr, WORDS: gl.constexpr, KEYS: gl.constexpr):
    """Return values ``[WORDS, KEYS]``: keys from ``AT % TILE_N`` on, of share ``AT // TILE_N``."""
    TILE_N: gl.constexpr = keys.shape[0]
    part = keys.slice(AT % TILE_N, KEYS).slice(AT // TILE_N * WORDS, WORDS, dim=1)
    return part.permute((1, 0)).load(value_words(WORDS, KEYS))


@gluon.jit
def _powers(s, scale, peak, lift, SCALES: gl.constexpr):
    """Return the exponents [keys, pairs] of weights, plus the lift if keys have scales.

    The function subtracts the lift, an integer, from the peak before it subtracts the result from
    the score. For keys with a large weight that result is small and exact, and so is the exponent,
    which float32 then rounds least.
    """
    if SCALES == "scalar":
        below = peak[None, :]
    else:
        below = peak[None, :] - lift[:, None]
    return s * scale[None, :] - below


@gluon.jit
def _store_weights(weights, factor, buffer, SCALES: gl.constexpr):
    """Store the weights [keys, pairs] as float16, times each key's `factor` if there is one."""
    if SCALES != "scalar":
        weights *= factor[:, None]
    buffer.store(weights.to(gl.float16))


@gluon.jit
def _waited(accs, last, SHARES: gl.constexpr):
    """Wait for all products, and return the sums of the shares; `last` is the last operand."""
    if SHARES == 1:
        only, last = warpgroup_mma_wait(0, deps=[accs[0], last])
        accs = (only,)
    else:
        gl.static_assert(SHARES == 4)
        first, second, third, fourth, last = warpgroup_mma_wait(
            0, deps=[accs[0], accs[1], accs[2], accs[3], last]
        )
        accs = (first, second, third, fourth)
    return accs


@gluon.jit
def _joined(accs, SHARES: gl.constexpr):
    """Return the outputs of all shares as one tensor [R, pairs]."""
    joined = accs[0]
    if SHARES == 4:
        joined = _above(_above(accs[0], accs[1]), _above(accs[2], accs[3]))
        joined = gl.convert_layout(joined, accs[0].type.layout, assert_trivial=True)
    return joined


@gluon.jit
def _above(first, second):
    """Return the rows of `first` and then those of `second`."""
    ROWS: gl.constexpr = first.shape[0]
    PAIRS: gl.constexpr = first.shape[1]
    return gl.join(first, second).permute((2, 0, 1)).reshape([2 * ROWS, PAIRS])


@gluon.jit
def _state_at(accs, sums, pair, R: gl.constexpr):
    """Return the offsets of `accs` and `sums` in a state whose pairs have the indices `pair`."""
    SHARES: gl.constexpr = len(accs)
    WIDTH: gl.constexpr = R // SHARES
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, accs[0].type.layout))
    accs_at = ()
    for share in gl.static_range(SHARES):
        accs_at += (pair[None, :] * R + share * WIDTH + column[:, None],)
    TILES: gl.constexpr = sums.shape[0]
    layout: gl.constexpr = sums.type.layout
    tile = gl.arange(0, TILES, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    key = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    pair = gl.convert_layout(pair, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    PAIRS: gl.constexpr = sums.shape[2]
    sums_at = (pair + PAIRS)[None, None, :] * R + tile[:, None, None] * 8 + key[None, :, None]
    return accs_at, sums_at


@gluon.jit
def _store_state(accs, sums, peaks, answers, R: gl.constexpr):
    """Store the state of a split; another program continues from it."""
    pair_layout: gl.constexpr = gl.SliceLayout(0, accs[0].type.layout)
    pair = state_pairs(gl.program_id(0), sums.shape[2], pair_layout)
    accs_at, sums_at = _state_at(accs, sums, pair, R)
    for share in gl.static_range(len(accs)):
        gl.store(answers.partial_out_ptr + accs_at[share], accs[share])
    gl.store(answers.partial_out_ptr + sums_at, sums)
    gl.store(answers.partial_lse_ptr + pair, peaks.load(pair_layout))


@gluon.jit
def _begin(
    step, segment, answers, peaks, R: gl.constexpr, SHARES: gl.constexpr, s_layout: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Return the first sums of values, [R / SHARES, pairs] each, and own sums of weights.

    They come from a state if the segment resumes one; then the function also stores its peaks.
    """
    PAIRS: gl.constexpr = step.TILE_M
    accs = ()
    for _share in gl.static_range(SHARES):
        accs += (gl.zeros([R // SHARES, PAIRS], gl.float32, layout),)
    sums = _own_sum(gl.zeros([step.TILE_N, PAIRS], gl.float32, s_layout))  # [TILE_N / 16, 8, PAIRS]
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            pair = taken_pairs(step, 0, gl.SliceLayout(0, layout))
            accs_at, sums_at = _state_at(accs, sums, pair, R)
            taken = ()
            for share in gl.static_range(SHARES):
                taken += (gl.load(answers.partial_out_ptr + accs_at[share]),)
            accs = taken
            sums = gl.load(answers.partial_out_ptr + sums_at)
            peaks.store(gl.load(answers.partial_lse_ptr + pair))
            thread_barrier()
    return accs, sums


@gluon.jit
def _attend_tiles(
    step, segment, accs, sums, staged, ring, stage, phase, R: gl.constexpr, SCALES: gl.constexpr,
    BOX: gl.constexpr, s_layout: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Add the key tiles of a segment to the results of ``_begin``, `accs` and `sums`.

    Returns
    -------
    accs : [R / SHARES, pairs] each
        Sums of weighted values, with columns in the order of ``values_of``.
    sums : [TILE_N / 16, 8, pairs]
        Own sums of weights, relative to the peaks.
    stage, phase
        Position in the ring after these tiles.
    """
    TILE_N: gl.constexpr = step.TILE_N
    STAGES: gl.constexpr = ring.ready.shape[0]
    SHARES: gl.constexpr = len(accs)
    PAIRS: gl.constexpr = step.TILE_M
    KEYS: gl.constexpr = min(TILE_N, SHARES * (32 if PAIRS < 64 else 16))  # keys of a product
    WORDS: gl.constexpr = R // 2 // SHARES
    of_values: gl.constexpr = gl.SliceLayout(0, value_words(WORDS, KEYS))
    s_pair: gl.constexpr = gl.SliceLayout(0, s_layout)
    key_layout: gl.constexpr = gl.SliceLayout(1, s_layout)
    pair_layout: gl.constexpr = gl.SliceLayout(0, layout)
    everywhere: gl.constexpr = gl.BlockedLayout([_WARPS], [32], [_WARPS], [0])
    own_layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, sums.type.layout))
    seq_len = segment.seq_len
    key_scales = ring.key_scales
    peaks = staged.peaks
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        mbarrier.wait(ring.ready.index(stage), phase)
        keys = ring.ckv.index(stage)
        if BOX > 0 and tile * TILE_N + TILE_N > seq_len:  # a code may be NaN, and 0 * NaN is NaN
            clear_tail(keys, seq_len - tile * TILE_N, TILE_N, R // 2, _WARPS)
            fence_async_shared()
            thread_barrier()
        # `zero` is 0, but the compiler cannot know this. Otherwise it would keep the descriptors of
        # the queries in registers, which are scarce.
        zero = stage >> 8
        key_scale = None
        if SHARES == 1:
            s = _scores(staged, keys, ring.k_pe.index(stage), zero, s_layout)
            if SCALES != "scalar":
                key_scale = key_scales.index(stage).load(key_layout)
                s = s * key_scale[:, None]
        else:
            s = _scores_of_shares(
                staged, keys, ring.k_pe.index(stage), key_scales, stage * SHARES, zero, s_layout
            )
            of_shares = load_scales(key_scales, stage * SHARES, SHARES, key_layout)
            key_scale = key_scale_of(of_shares)
            store_ratios(of_shares, key_scale, staged.ratios, 0)
        lift = None
        factor = None
        if SCALES != "scalar":
            lift = lift_of(key_scale)
            unlifted = gl.exp2(-lift)
            factor = key_scale * unlifted
        words = _load_values(keys, 0, WORDS, KEYS)
        if tile >= segment.tile_edge:
            s = masked(step, segment, s, tile, 0)
        scale = staged.scales.load(s_pair)
        peak = peaks.load(s_pair)
        # Peaks rise seldom. So the weights use the old peaks first, and are computed again if a
        # peak must rise.
        power = _powers(s, scale, peak, lift, SCALES)
        weights = gl.exp2(power)
        _store_weights(weights, factor, staged.weights, SCALES)
        staged.exceeds.store(gl.max(_by_warp((power > LAZY).to(gl.int32)), 1))
        fence_async_shared()
        thread_barrier()
        if gl.max(staged.exceeds.load(everywhere), 0) > 0:
            if SCALES == "scalar":
                highest = gl.max(s, 0) * scale
            else:
                highest = gl.max(s * scale[None, :] + lift[:, None], 0)
            new_peak = raised(peak, highest)
            weights = gl.exp2(_powers(s, scale, new_peak, lift, SCALES))
            keep = gl.exp2(peak - new_peak)
            sums = sums * gl.convert_layout(keep, own_layout)[None, None, :]
            _store_weights(weights, factor, staged.weights, SCALES)
            fence_async_shared()
            peaks.store(new_peak)
            keep = gl.convert_layout(keep, pair_layout)
            kept = ()
            for share in gl.static_range(SHARES):
                kept += (accs[share] * keep[None, :],)
            accs = kept
            thread_barrier()
        if SCALES != "scalar":
            weights *= unlifted[:, None]
        sums += _own_sum(weights)
        summed = ()
        for share in gl.static_range(SHARES):
            acc = accs[share]
            for first in gl.static_range(0, TILE_N, KEYS):
                if SHARES == 1:
                    values = values_of(words, layout)
                else:
                    ratios = staged.ratios.index(share).slice(first, KEYS).load(of_values)
                    ratios = ratios[None, :].broadcast_to([WORDS, KEYS])
                    values = values_of(words, layout, ratios)
                if share * TILE_N + first + KEYS < SHARES * TILE_N:
                    words = _load_values(keys, share * TILE_N + first + KEYS, WORDS, KEYS)
                acc = warpgroup_mma(values, staged.weights.slice(first, KEYS), acc, is_async=True)
                if share + first == 0:
                    last = values
                last = warpgroup_mma_wait(1, deps=[last])
                last = values
            summed += (acc,)
        accs = _waited(summed, last, SHARES)
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = next_stage(stage, phase, STAGES)
    return accs, sums, stage, phase


@gluon.jit
def _store_answers(step, segment, accs, sums, cache_scale, staged, answers):
    """Store out and lse of a query tile, or its partial result.

    The outputs go through the buffer of the queries, which no product reads any more.
    """
    pair_layout: gl.constexpr = gl.SliceLayout(0, accs[0].type.layout)
    total = gl.convert_layout(gl.sum(gl.sum(sums, 1), 0), pair_layout)
    out = _joined(accs, len(accs))
    is_empty = total == 0.0
    out *= answer_factor(is_empty, total, cache_scale)[None, :]
    lse = answer_lse(is_empty, staged.peaks.load(pair_layout), total)
    store_answers(step, segment, (out,), staged.q_nope, lse, answers)


@gluon.jit
def _attend(
    step, q_nope, q_pe, rope, scales, answers, staged, ring, softmax_scale, R: gl.constexpr,
    P: gl.constexpr, BOX: gl.constexpr,
):  # fmt: skip
    """Compute the attention of every segment of this program; the role of the computing warps."""
    ALONG: gl.constexpr = min(_WARPS, step.TILE_N // 16)
    ACROSS: gl.constexpr = _WARPS // ALONG
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [ALONG, ACROSS], [16, step.TILE_M // ACROSS, 16]
    )
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, step.TILE_M, 16])
    cache_scale = gl.load(scales.ptr) if scales.SCALES == "scalar" else 1.0
    unit, end, row = program_work_range(step)
    is_first = True
    stage = 0
    phase = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        _stage_queries(
            step, segment, q_nope, q_pe, rope, staged, ring.empty, is_first,
            cache_scale * softmax_scale * LOG2_E, R, P,
        )  # fmt: skip
        is_first = False
        accs, sums = _begin(
            step, segment, answers, staged.peaks, R, scales.SHARES, s_layout, layout
        )
        accs, sums, stage, phase = _attend_tiles(
            step, segment, accs, sums, staged, ring, stage, phase, R, scales.SCALES, BOX,
            s_layout, layout,
        )  # fmt: skip
        if step.FIXED_SPLITS > 0 and segment.suspends:
            _store_state(accs, sums, staged.peaks, answers, R)
            state_stored(step, 0)
        else:
            _store_answers(step, segment, accs, sums, cache_scale, staged, answers)
        unit = segment.next_unit


@gluon.jit
def _decode(
    step, keys, scales, q_nope, q_pe, rope, answers, softmax_scale, R: gl.constexpr,
    P: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Allocate shared memory, initialize the barriers, and start the roles."""
    TILE_M: gl.constexpr = step.TILE_M
    TILE_N: gl.constexpr = step.TILE_N
    wide: gl.constexpr = keys.ckv_desc.layout
    slim: gl.constexpr = keys.k_pe_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ckv = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, R // 2], wide)
    staged_nope = gl.allocate_shared_memory(gl.float16, [2, TILE_M, R // 2], wide)
    if scales.SCALES == "inline":
        PIECES: gl.constexpr = 1 if q_pe.ptr.dtype.element_ty == gl.bfloat16 else 2
        k_pe = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, P], slim)
        staged_pe = gl.allocate_shared_memory(gl.bfloat16, [PIECES, TILE_M, P], slim)
        ratios = gl.allocate_shared_memory(gl.float16, [scales.SHARES, TILE_N], flat)
    else:
        k_pe = gl.allocate_shared_memory(gl.int16, [STAGES, TILE_N, P // 2], slim)
        staged_pe = gl.allocate_shared_memory(gl.float16, [2, TILE_M, P // 2], slim)
        ratios: gl.constexpr = None
    if scales.SCALES == "scalar":
        key_scales: gl.constexpr = None
    else:
        key_scales = gl.allocate_shared_memory(gl.float32, [STAGES * scales.SHARES, TILE_N], flat)
    weights = gl.allocate_shared_memory(
        gl.float16, [TILE_N, TILE_M], gl.NVMMASharedLayout(TILE_M * 2, 16, 2)
    )
    q_scales = gl.allocate_shared_memory(gl.float32, [TILE_M], flat)
    peaks = gl.allocate_shared_memory(gl.float32, [TILE_M], flat)
    exceeds = gl.allocate_shared_memory(gl.int32, [_WARPS], flat)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    staged = _Staged(staged_nope, staged_pe, q_scales, peaks, weights, ratios, exceeds)
    ring = Ring(ckv, k_pe, key_scales, ready, empty)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=tile_arrivals(keys.BOX, scales.SCALES))
        mbarrier.init(empty.index(stage), count=1)
    # After this arrival the copying warps wait for a second one, which the computing warps make
    # when the loads of the first queries are issued. Otherwise the copies would be ahead of these.
    for stage in gl.static_range(1, STAGES):
        mbarrier.arrive(empty.index(stage))
    fence_async_shared()
    gdc_wait()  # this kernel starts before the step's earlier kernels end, and reads their results
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _attend,
                (
                    step, q_nope, q_pe, rope, scales, answers, staged, ring, softmax_scale,
                    R, P, keys.BOX,
                ),
            ),
            (copy_tiles, (step, keys, scales, ring, R // 2)),
        ],
        [4 if keys.BOX == 0 else 1],
        [40 if keys.BOX == 0 else 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["scales_ptr"])
def decode_few_fp8_kernel(
    work: Work,
    q_nope: Lines,  # [T, H, R]
    q_pe: Lines,  # [T, H, P]
    rope_tables: RopeTables,
    cache_ptr,  # rows of bytes; read if no box fits
    scales_ptr,  # float32 [] or [num_blocks, 1, G]; or the cache, if rows contain scales
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
    ckv_desc,  # int16 [cache rows, words of a row], in boxes [BOX, R / 2]
    k_pe_desc,  # the same tensor, in boxes [BOX, words of k_pe]
    tiles: Tiles,
    geometry: Geometry,
    scale_format: ScaleFormat,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
    R: gl.constexpr,
    P: gl.constexpr,
    STAGES: gl.constexpr,
):
    words: gl.constexpr = gl.pointer_type(gl.int16)
    _decode(
        Step(*work, *tiles),
        Keys(
            cache_ptr.to(words), ckv_desc, k_pe_desc, block_table_ptr, stride_table_row,
            stride_table_col, num_blocks, *geometry,
        ),
        Scales(scales_ptr, *scale_format), q_nope, q_pe, Rope(*rope_tables, ROPE),
        Answers(out, Lines(lse_ptr, stride_lse_token, stride_lse_head), *partials),
        softmax_scale, R, P, STAGES,
    )  # fmt: skip
