"""Split attention over e4m3 caches with 16-bit products in tiles of 64 pairs on Hopper.

The kernel implements rules S-4 to S-7, S-11 and S-20. It is exact like ``decode_few_fp8.py``, and
has the same operands, ``S^T = K Q^T`` and ``O^T = V^T P^T``: keys and values are unpacked to
float16 in registers (``e4m3.py``), and queries become float16 (``queries.py``).

The grid has a fixed number of programs. A program works on the segments of its share, one after
another (``schedule.py``). It stores `out` and `lse` of whole groups, and partial results of the
others, which ``combine.py`` joins. With FIXED_SPLITS it may wait for the state of another program
(``split_handoff.py``).

A program has three roles, and no code is unpacked twice for the same product:

* one warp group unpacks keys and computes scores (``_score``);
* two warp groups compute weights from the scores, and unpack values, half of the latent columns
  each (``_answer``);
* one warp, or four without boxes, copies key tiles into a ring of three stages (``copy_tiles``).

The scores of a tile are computed, and ``PV`` of the tile before ends, while the weights of another
tile are computed. So the two warp groups wait only for work that started a tile earlier. Scores and
weights are in shared memory as [pairs, keys]. Four lanes hold the keys of a pair. Each has the peak
of the pair, and the sum and the maximum of its own keys. The lanes exchange maxima only if a warp
votes that one of its pairs may have to rise. The warp group of scores multiplies scores by the
scales of keys, and stores the factors of weights that depend on these scales. For rows with several
scales see ``scale_groups.py``.

Barriers: ``staged`` and ``taken`` complete once for every segment, ``scored`` and ``weighed`` once
for every key tile (see ``_Staged``), and ``ready`` and ``empty`` of the ring as in ``keys.py``.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from paged_mla_optimized.kernels.common.logarithms import LOG2_E
from paged_mla_optimized.kernels.common.optimization_barrier import opaque
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
    higher,
    lift_of,
    own_sums,
    own_sums_at,
)
from paged_mla_optimized.triton_compat.gluon_names import read_as, thread_barrier

_STAGES = gl.constexpr(3)
_WARPS = gl.constexpr(8)  # warps that compute weights and outputs
_CHUNK = gl.constexpr(16)  # words of keys at a time
_WORDS = gl.constexpr(128)  # words, of two columns each, of the values of one product
_KEYS = gl.constexpr(16)  # keys of one product of values
_OWN = gl.constexpr(8)  # neighboring keys of a pair in a lane: 16 bytes of weights
_SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
_ANSWERS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 64, 16]))
_PAIRS = gl.constexpr(gl.SliceLayout(0, _ANSWERS))
_BY_PAIR = gl.constexpr(gl.BlockedLayout([1, _OWN], [8, 4], [_WARPS, 1], [1, 0]))
_ALL_LANES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [_WARPS, 1], [1, 0]))
_ALL_FOUR = gl.constexpr(gl.BlockedLayout([4], [32], [_WARPS], [0]))
_ALL_FOUR_OF_SCORES = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
_IN_EVERY_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # of the warps of scores
_EVERYWHERE = gl.constexpr(gl.BlockedLayout([_WARPS], [32], [_WARPS], [0]))


class _Staged(NamedTuple):
    """The shared memory of all roles, and barriers: two for each segment and two for each tile."""

    q_nope: gl.shared_memory_descriptor  # float16 [2, 64, 256], see ``queries.py``; later outputs
    q_pe: gl.shared_memory_descriptor  # float16 [2, 64, 32] or bfloat16 [1, 64, 64]
    s: gl.shared_memory_descriptor  # float32 [64 pairs, 64 keys]: scores times scales of keys
    factors: (
        gl.shared_memory_descriptor
    )  # float16 [_STAGES, 64], see ``_publish_key_scales``; or None
    lifts: gl.shared_memory_descriptor  # float32 [_STAGES, 4], all four the tile's lift; or None
    ratios: gl.shared_memory_descriptor  # float16 [_STAGES * SHARES, 64] (``scale_groups.py``)
    weights: gl.shared_memory_descriptor  # float16 [2 or 1, 64 pairs, 64 keys]
    keeps: gl.shared_memory_descriptor  # float32 [64, 4]: factors of the sums so far of each pair
    rises: gl.shared_memory_descriptor  # int32 [_WARPS]: whether a peak of a warp's pairs rose
    staged: gl.shared_memory_descriptor  # the query tile of a segment is stored
    taken: gl.shared_memory_descriptor  # the waits for `staged` are over; it may complete again
    scored: gl.shared_memory_descriptor  # the scores of a tile are stored
    weighed: gl.shared_memory_descriptor  # the scores of a tile have been read


@gluon.jit
def _load_words(ring, stage, AT: gl.constexpr):
    """Return words of a key tile as an operand.

    AT 0 returns the words of k_pe ``[64, 32]``. From AT _CHUNK on the function returns the latent
    words ``[64, _CHUNK]`` from ``AT - _CHUNK`` on.
    """
    operand: gl.constexpr = gl.DotOperandLayout(0, _SCORES, 2)
    if AT == 0:
        part = ring.k_pe.index(stage)
    else:
        part = ring.ckv.index(stage).slice(AT - _CHUNK, _CHUNK, dim=1)
    return part.load(operand)


@gluon.jit
def _queries_of(staged, zero, half: gl.constexpr, AT: gl.constexpr):
    """Return the queries that multiply one `half` of the unpacked words of ``_load_words``."""
    if AT == 0:
        part = staged.q_pe.index(zero + half)
    else:
        part = staged.q_nope.index(zero + half).slice(AT - _CHUNK, _CHUNK, dim=1)
    return part.permute((1, 0))


@gluon.jit
def _publish_key_scales(key_scale, staged, stage):
    """Store the lift of a tile, and the float16 factor of each key.

    Weights times 2 ** lift become float16. Times these factors they are the weights of the codes.
    """
    bits = gl.max(key_scale.to(gl.int32, bitcast=True), 0)  # a warp has one instruction for this
    lift = lift_of(bits.to(gl.float32, bitcast=True))
    staged.factors.index(stage).store((key_scale * gl.exp2(-lift)).to(gl.float16))
    staged.lifts.index(stage).store(gl.full([4], 0.0, gl.float32, _ALL_FOUR_OF_SCORES) + lift)


@gluon.jit
def _store_scores(s, staged, ring, stage, turn, scales):
    """Store the scores of the `turn`-th tile after the scores of the tile before have been read.

    The tile is in the stage before `stage`. Returns the number of the next tile.
    """
    SHARES: gl.constexpr = scales.SHARES
    if scales.SCALES != "scalar":
        before = gl.where(stage == 0, _STAGES - 1, stage - 1)
        of_shares = load_scales(ring.key_scales, before * SHARES, SHARES, _IN_EVERY_WARP)
        if SHARES == 1:
            s = s * ring.key_scales.index(before).load(gl.SliceLayout(1, _SCORES))[:, None]
            _publish_key_scales(of_shares[0], staged, before)
        else:
            key_scale = key_scale_of(of_shares)
            store_ratios(of_shares, key_scale, staged.ratios, before * SHARES)
            _publish_key_scales(key_scale, staged, before)
    mbarrier.wait(staged.weighed, (turn & 1) ^ 1)
    staged.s.store(s.permute((1, 0)))
    mbarrier.arrive(staged.scored)
    return turn + 1


@gluon.jit
def _products(words, following, staged, ring, stage, zero):
    """Return the scores of a tile, without scales; `words` and `following` are its first chunks."""
    s = gl.zeros([64, 64], gl.float32, _SCORES)
    for at in gl.static_range(0, 256 + _CHUNK, _CHUNK):
        left, right = contracted(words)
        words = following
        if at + 2 * _CHUNK < 256 + _CHUNK:
            following = _load_words(ring, stage, at + 2 * _CHUNK)
        s = warpgroup_mma(left, _queries_of(staged, zero, 0, at), s, use_acc=at > 0, is_async=True)
        s = warpgroup_mma(right, _queries_of(staged, zero, 1, at), s, is_async=True)
        if at > 2 * _CHUNK:  # products of three chunks may still run, and read their registers
            warpgroup_mma_wait(6, deps=[left, right])
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def _products_of_shares(words, following, staged, ring, stage, zero, SHARES: gl.constexpr):
    """Return the scores of a tile whose keys have a scale for each share; they include scales."""
    WIDTH: gl.constexpr = 256 // SHARES
    k_pe = read_as(ring.k_pe.index(stage), gl.bfloat16, [64, 64], ring.k_pe.layout)
    s = gl.zeros([64, 64], gl.float32, _SCORES)
    share = s
    q_pe = staged.q_pe.index(zero).permute((1, 0))
    s = warpgroup_mma(k_pe, q_pe, s, use_acc=False, is_async=True)
    left, right = contracted(words)
    for at in gl.static_range(0, 256, _CHUNK):
        q_left = _queries_of(staged, zero, 0, _CHUNK + at)
        q_right = _queries_of(staged, zero, 1, _CHUNK + at)
        share = warpgroup_mma(left, q_left, share, use_acc=at % WIDTH > 0, is_async=True)
        share = warpgroup_mma(right, q_right, share, is_async=True)
        last_left = left
        last_right = right
        if at + _CHUNK < 256:  # the next words are unpacked while these products run
            words = following
            if at + 2 * _CHUNK < 256:
                following = _load_words(ring, stage, at + 3 * _CHUNK)
            left, right = contracted(words)
        if (at + _CHUNK) % WIDTH == 0:
            of_share = ring.key_scales.index(stage * SHARES + at // WIDTH)
            scale = of_share.load(gl.SliceLayout(1, _SCORES))
            s, share, last_left, last_right = warpgroup_mma_wait(
                0, deps=[s, share, last_left, last_right]
            )
            s += share * scale[:, None]
        elif at % WIDTH > 0:
            last_left, last_right = warpgroup_mma_wait(2, deps=[last_left, last_right])
    return s


@gluon.jit
def _score(step, staged, ring, scales):
    """Store the scores of every tile of every segment, without the scales of pairs.

    This is the role of the warp group of scores.
    """
    unit, end, row = program_work_range(step)
    stage = 0
    phase = 0
    turn = 0
    odd = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        mbarrier.wait(staged.staged, odd)
        mbarrier.arrive(staged.taken)
        odd ^= 1
        s = gl.zeros([64, 64], gl.float32, _SCORES)
        for visit in range(segment.tile_begin, segment.tile_end):
            mbarrier.wait(ring.ready.index(stage), phase)
            # Words are loaded two chunks before they are unpacked.
            FIRST: gl.constexpr = 0 if scales.SHARES == 1 else _CHUNK  # then k_pe is bfloat16
            words = _load_words(ring, stage, FIRST)
            following = _load_words(ring, stage, FIRST + _CHUNK)
            if visit > segment.tile_begin:
                turn = _store_scores(s, staged, ring, stage, turn, scales)
            # `zero` is 0, but the compiler cannot know this. Otherwise it would keep the
            # descriptors of the queries in registers, which are scarce.
            zero = stage >> 8
            if scales.SHARES == 1:
                s = _products(words, following, staged, ring, stage, zero)
            else:
                s = _products_of_shares(words, following, staged, ring, stage, zero, scales.SHARES)
            phase = gl.where(stage == _STAGES - 1, phase ^ 1, phase)
            stage = gl.where(stage == _STAGES - 1, 0, stage + 1)
        if segment.tile_begin < segment.tile_end:
            turn = _store_scores(s, staged, ring, stage, turn, scales)
        unit = segment.next_unit


@gluon.jit
def _own_highest(s):
    """Return the highest, or NaN, [64, 4] of the scores [64, 64] that each lane holds of a pair."""
    return gl.reduce(gl.reduce(s.reshape([64, 64 // 4 // _OWN, 4, _OWN]), 3, higher), 1, higher)


@gluon.jit
def _spread(own):
    """Return the numbers [64, 4] that each lane has for its pair, broadcast to scores [64, 64]."""
    beside = own[:, None, :, None].broadcast_to([64, 64 // 4 // _OWN, 4, _OWN]).reshape([64, 64])
    return gl.convert_layout(beside, _BY_PAIR, assert_trivial=True)


# Outputs 0 and 1: the new peak, and whether a peak of the warp may have risen. Inputs 2 to 4: the
# highest score that a lane holds of its pair, the peak, and the score above which the peak rises.
_RAISE = gl.constexpr("""{
    .reg .pred p;
    .reg .f32 x, y;
    mov.b32 $0, $3;
    mov.b32 $1, 0;
    setp.gtu.f32 p, $2, $4;
    vote.sync.any.pred p, p, 0xffffffff;
    @!p bra.uni RAISED;
    mov.b32 $1, 1;
    shfl.sync.bfly.b32 y, $2, 1, 31, 0xffffffff;
    max.NaN.f32 x, $2, y;
    shfl.sync.bfly.b32 y, x, 2, 31, 0xffffffff;
    max.NaN.f32 x, x, y;
    setp.gtu.f32 p, x, $4;
    @p max.NaN.f32 $0, $3, x;
    RAISED:
    }""")


@gluon.jit
def _have_risen(staged):
    """Return whether a peak of any warp may have risen; all warps must have stored `rises`."""
    return gl.max(staged.rises.load(_EVERYWHERE), 0) > 0


@gluon.jit
def _raise_peaks(peak, highest, staged, EARLY: gl.constexpr):
    """Return the peaks [64, 4], or NaN, the factors of the sums so far, and whether any peak rose.

    `highest` is the highest score that each lane holds. The peaks rise as in ``softmax.py``. With
    EARLY all warps synchronize here, before the weights are computed, to find out whether a peak of
    any warp may have risen. Without EARLY the last result is True. If it is true, the function
    stores the factors for all warps.
    """
    new_peak, rise = gl.inline_asm_elementwise(
        _RAISE, "=&f,=&r,f,f,f", [highest, peak, peak + LAZY], dtype=(gl.float32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip
    keep = gl.exp2(peak - new_peak)
    staged.rises.store(gl.max(rise.reshape([_WARPS, 32]), 1))
    have_risen = True  # not known yet without EARLY
    if EARLY:
        thread_barrier()
        have_risen = _have_risen(staged)
    if have_risen:
        staged.keeps.store(keep)
    return new_peak, keep, have_risen


@gluon.jit
def _weigh(step, segment, tile, peak, sums, scale, staged, stage, scales):
    """Return the weights of a tile's codes, and the peaks and own sums of all pairs, [64, 4].

    The last result is whether a peak of any warp may have risen; it is valid for rows with several
    scales only.
    """
    s = staged.s.load(_BY_PAIR)
    if tile >= segment.tile_edge:
        s = masked(step, segment, s, tile, 1)
    highest = _own_highest(s) * scale
    EARLY: gl.constexpr = scales.SHARES > 1
    if scales.SCALES == "scalar":
        peak, keep, have_risen = _raise_peaks(peak, highest, staged, EARLY)
        weights = gl.exp2(s * _spread(scale) - _spread(peak))
        of_codes = weights.to(gl.float16)
        own = own_sums(weights, _OWN)
    else:
        lift = gl.max(staged.lifts.index(stage).load(_ALL_FOUR), 0)
        peak, keep, have_risen = _raise_peaks(peak, highest + lift, staged, EARLY)
        weights = gl.exp2(s * _spread(scale) - _spread(peak - lift))
        factors = staged.factors.index(stage).load(gl.SliceLayout(0, _BY_PAIR))
        of_codes = weights.to(gl.float16) * factors[None, :]
        own = own_sums(weights, _OWN) * gl.exp2(-lift)
    return of_codes, peak, sums * keep + own, have_risen


@gluon.jit
def _arrive_alone(bar):
    """Arrive at a barrier for each thread on its own, so that no thread waits for others.

    The instruction arrives when the asynchronous copies of the thread have ended; these threads
    have started none.
    """
    async_copy.mbarrier_arrive(bar, increment_count=False)


@gluon.jit
def _load_values(keys, NUMBER: gl.constexpr):
    """Return the values ``[_WORDS, _KEYS]`` of product NUMBER.

    Even numbers are the low columns of _KEYS keys, odd numbers the high columns of the same keys.
    """
    part = keys.slice(NUMBER // 2 * _KEYS, _KEYS).slice(NUMBER % 2 * _WORDS, _WORDS, dim=1)
    return part.permute((1, 0)).load(value_words(_WORDS, _KEYS))


@gluon.jit
def _ratios_of(ratios, first, NUMBER: gl.constexpr, SHARES: gl.constexpr):
    """Return the ratios ``[_WORDS, _KEYS]`` of the values of product NUMBER.

    `first` is the index of the ratios of the tile's first share.
    """
    gl.static_assert(SHARES == 4)
    half: gl.constexpr = gl.SliceLayout(0, value_words(_WORDS // 2, _KEYS))
    first += NUMBER % 2 * 2
    upper = ratios.index(first).slice(NUMBER // 2 * _KEYS, _KEYS).load(half)
    lower = ratios.index(first + 1).slice(NUMBER // 2 * _KEYS, _KEYS).load(half)
    upper = upper[None, :].broadcast_to([_WORDS // 2, _KEYS])
    lower = lower[None, :].broadcast_to([_WORDS // 2, _KEYS])
    both = gl.join(upper, lower).permute((2, 0, 1)).reshape([_WORDS, _KEYS])
    return gl.convert_layout(both, value_words(_WORDS, _KEYS), assert_trivial=True)


@gluon.jit
def _multiply(
    low, high, keys, weights, words, following, empty, ratios, stage, SHARES: gl.constexpr
):
    """Start to add a tile's values times its weights to the sums of low and of high columns.

    `words` and `following` are the values of the first two products. The function frees the stage
    of the tile.
    """
    PRODUCTS: gl.constexpr = 2 * 64 // _KEYS
    first = stage * SHARES
    if SHARES > 1:
        of_words = _ratios_of(ratios, first, 0, SHARES)
    for number in gl.static_range(PRODUCTS):
        if SHARES == 1:
            values = values_of(words, _ANSWERS)
        else:
            values = values_of(words, _ANSWERS, of_words)
            if number + 1 < PRODUCTS:
                of_words = _ratios_of(ratios, first, number + 1, SHARES)
        words = following
        if number + 2 < PRODUCTS:
            following = _load_values(keys, number + 2)
        if number == PRODUCTS - 1:
            _arrive_alone(empty)
        of_keys = weights.slice(number // 2 * _KEYS, _KEYS, dim=1).permute((1, 0))
        if number % 2 == 0:
            low = warpgroup_mma(values, of_keys, low, is_async=True)
        else:
            high = warpgroup_mma(values, of_keys, high, is_async=True)
        if number > 0:
            warpgroup_mma_wait(1, deps=[values])
    return low, high


@gluon.jit
def _attend_tiles(
    step, segment, low, high, peak, sums, scale, staged, ring, stage, phase, turn,
    scales, BOX: gl.constexpr,
):  # fmt: skip
    """Add the key tiles of a segment to the results of ``_begin``: low, high, peak and sums.

    Returns these, the position in the ring, and the number of tiles so far.
    """
    BUFFERS: gl.constexpr = staged.weights.shape[0]
    low = warpgroup_mma_init(low)
    high = warpgroup_mma_init(high)
    for visit in range(segment.tile_begin, segment.tile_end):
        tile = tile_of_visit(step, segment, visit)
        mbarrier.wait(ring.ready.index(stage), phase)
        keys = ring.ckv.index(stage)
        mbarrier.wait(staged.scored, turn & 1)
        if BOX > 0 and tile * 64 + 64 > segment.seq_len:  # a code may be NaN, and 0 * NaN is NaN
            clear_tail(keys, segment.seq_len - tile * 64, 64, 256, _WARPS)
        of_codes, peak, sums, have_risen = _weigh(
            step, segment, tile, peak, sums, scale, staged, stage, scales
        )
        weights = staged.weights.index(turn & (BUFFERS - 1))
        if BUFFERS == 1:
            low, high = warpgroup_mma_wait(0, deps=[low, high])
            thread_barrier()
        weights.store(of_codes)
        if BUFFERS > 1:
            low, high = warpgroup_mma_wait(0, deps=[low, high])
        # With several scales a key, the other roles wait for the unpacking of values. So its first
        # operands are loaded before the barrier.
        if scales.SHARES > 1:
            words = _load_values(keys, 0)
            following = _load_values(keys, 1)
        fence_async_shared()
        _arrive_alone(staged.weighed)
        thread_barrier()
        if scales.SHARES == 1:
            words = _load_values(keys, 0)
            following = _load_values(keys, 1)
            have_risen = _have_risen(staged)
        if have_risen:
            keep = gl.convert_layout(gl.max(staged.keeps.load(_ALL_LANES), 1), _PAIRS)[None, :]
            low = low * keep
            high = high * keep
        empty = ring.empty.index(stage)
        low, high = _multiply(
            low, high, keys, weights, words, following, empty, staged.ratios, stage, scales.SHARES
        )
        turn += 1
        phase = gl.where(stage == _STAGES - 1, phase ^ 1, phase)
        stage = gl.where(stage == _STAGES - 1, 0, stage + 1)
    low, high = warpgroup_mma_wait(0, deps=[low, high])
    return low, high, peak, sums, stage, phase, turn


@gluon.jit
def _columns_at(pair):
    """Return the offsets of low columns [256, 64] in a state of the pairs with indices `pair`."""
    column = gl.arange(0, 256, layout=gl.SliceLayout(1, _ANSWERS))
    return pair[None, :] * 512 + column[:, None]


@gluon.jit
def _begin(step, segment, answers):
    """Return the first sums of low and high columns, [256, 64], and peaks and own sums [64, 4].

    They come from a state if the segment resumes one.
    """
    low = gl.zeros([256, 64], gl.float32, _ANSWERS)
    high = gl.zeros([256, 64], gl.float32, _ANSWERS)
    sums = own_sums(gl.zeros([64, 64], gl.float32, _BY_PAIR), _OWN)
    layout: gl.constexpr = sums.type.layout
    peak = gl.full([64, 4], FLOOR, gl.float32, layout)
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            pair = taken_pairs(step, 0, _PAIRS)
            ptrs = answers.partial_out_ptr + _columns_at(pair)
            low = gl.load(ptrs)
            high = gl.load(ptrs + 256)
            sums = gl.load(answers.partial_out_ptr + own_sums_at(sums, pair))
            of_pair = gl.convert_layout(pair, gl.SliceLayout(1, layout))
            peak = gl.load(answers.partial_lse_ptr + of_pair)[:, None].broadcast_to([64, 4])
        # Without ``opaque`` ptxas would serialize products whose accumulators are loaded in a
        # branch (warning C7515).
        low = opaque(low)
        high = opaque(high)
    return low, high, peak, sums


@gluon.jit
def _leave(step, low, high, peak, sums, answers):
    """Store the state of a split; another program continues from it."""
    layout: gl.constexpr = sums.type.layout
    pair = state_pairs(gl.program_id(0), 64, _PAIRS)
    ptrs = answers.partial_out_ptr + _columns_at(pair)
    gl.store(ptrs, low)
    gl.store(ptrs + 256, high)
    gl.store(answers.partial_out_ptr + own_sums_at(sums, pair), sums)
    of_pair = gl.convert_layout(pair, gl.SliceLayout(1, layout))
    gl.store(answers.partial_lse_ptr + of_pair, gl.reduce(peak, 1, higher))
    state_stored(step, 0)


@gluon.jit
def _store(step, segment, low, high, peak, sums, cache_scale, buffer, answers):
    """Store out and lse of a query tile, or its partial result.

    The outputs go through the buffer of the queries, which no product reads any more.
    """
    total = gl.sum(sums, 1)
    peak = gl.reduce(peak, 1, higher)
    is_empty = (total == 0.0) & (peak == FLOOR)  # false if a score is infinite
    factor = gl.convert_layout(answer_factor(is_empty, total, cache_scale), _PAIRS)[None, :]
    low = low * factor
    high = high * factor
    lse = answer_lse(is_empty, peak, total)
    store_answers(step, segment, (low, high), buffer, lse, answers)


@gluon.jit
def _stage(step, segment, q_nope, q_pe, rope, staged, scale, odd):
    """Store a query tile as float16.

    Returns `scale` divided by the power of two that multiplies each pair's queries.
    """
    nope, pe = load_query_tile(step, segment, q_nope, q_pe, rope, 512, 64, _WARPS)
    power = power_of(nope, pe)
    mbarrier.wait(staged.taken, odd ^ 1)
    store_halves(nope, power, staged.q_nope, 0)
    if staged.q_pe.dtype == gl.float16:
        store_halves(pe, power, staged.q_pe, 0)
    else:
        store_pieces(pe, power, staged.q_pe)
    fence_async_shared()
    mbarrier.arrive(staged.staged)
    return lowered(scale, power)


@gluon.jit
def _answer(
    step, q_nope, q_pe, rope, scales, answers, staged, ring, softmax_scale, BOX: gl.constexpr
):
    """Compute the weights and the outputs of every segment: the role of the two warp groups."""
    cache_scale = gl.load(scales.ptr) if scales.SCALES == "scalar" else 1.0
    unit, end, row = program_work_range(step)
    stage = 0
    phase = 0
    turn = 0
    odd = 0
    while unit < end:
        segment = find_segment(step, unit, end, row)
        row = segment.row
        scale = cache_scale * softmax_scale * LOG2_E
        scale = _stage(step, segment, q_nope, q_pe, rope, staged, scale, odd)
        odd ^= 1
        low, high, peak, sums = _begin(step, segment, answers)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, sums.type.layout))
        scale = scale[:, None].broadcast_to([64, 4])
        low, high, peak, sums, stage, phase, turn = _attend_tiles(
            step, segment, low, high, peak, sums, scale, staged, ring, stage, phase, turn,
            scales, BOX,
        )  # fmt: skip
        if step.FIXED_SPLITS > 0 and segment.suspends:
            _leave(step, low, high, peak, sums, answers)
        else:
            _store(step, segment, low, high, peak, sums, cache_scale, staged.q_nope, answers)
        unit = segment.next_unit


@gluon.jit
def _barrier(COUNT: gl.constexpr):
    """Return a barrier that completes after every COUNT arrivals."""
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=COUNT)
    return bar


@gluon.jit
def _decode(step, keys, scales, q_nope, q_pe, rope, answers, softmax_scale):
    """Allocate shared memory, initialize the barriers, and start the roles."""
    wide: gl.constexpr = keys.ckv_desc.layout
    slim: gl.constexpr = keys.k_pe_desc.layout
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_fours: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    # Groups of four keys of two neighboring pairs are in different banks.
    of_scores: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    ckv = gl.allocate_shared_memory(gl.int16, [_STAGES, 64, 256], wide)
    P_WORDS: gl.constexpr = 32 if scales.SHARES == 1 else 64
    k_pe = gl.allocate_shared_memory(gl.int16, [_STAGES, 64, P_WORDS], slim)
    key_scales = None
    if scales.SCALES != "scalar":
        key_scales = gl.allocate_shared_memory(gl.float32, [_STAGES * scales.SHARES, 64], flat)
    ready = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    ring = Ring(ckv, k_pe, key_scales, ready, empty)
    for stage in gl.static_range(_STAGES):
        mbarrier.init(ready.index(stage), count=tile_arrivals(keys.BOX, scales.SCALES))
        mbarrier.init(empty.index(stage), count=32 * _WARPS)
    factors = None
    lifts = None
    ratios = None
    if scales.SCALES != "scalar":
        factors = gl.allocate_shared_memory(gl.float16, [_STAGES, 64], flat)
        lifts = gl.allocate_shared_memory(gl.float32, [_STAGES, 4], flat)
    if scales.SHARES == 1:
        staged_pe = gl.allocate_shared_memory(gl.float16, [2, 64, 32], slim)
        BUFFERS: gl.constexpr = 2
    else:
        staged_pe = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], slim)
        ratios = gl.allocate_shared_memory(gl.float16, [_STAGES * scales.SHARES, 64], flat)
        BUFFERS: gl.constexpr = 1
    staged = _Staged(
        gl.allocate_shared_memory(gl.float16, [2, 64, 256], wide),
        staged_pe,
        gl.allocate_shared_memory(gl.float32, [64, 64], of_scores),
        factors,
        lifts,
        ratios,
        gl.allocate_shared_memory(gl.float16, [BUFFERS, 64, 64], gl.NVMMASharedLayout(128, 16, 2)),
        gl.allocate_shared_memory(gl.float32, [64, 4], by_fours),
        gl.allocate_shared_memory(gl.int32, [_WARPS], flat),
        _barrier(1), _barrier(1), _barrier(1), _barrier(32 * _WARPS),
    )  # fmt: skip
    fence_async_shared()
    gdc_wait()  # this kernel starts before the step's earlier kernels end, and reads their results
    gdc_launch_dependents()
    gl.warp_specialize(
        [
            (
                _answer,
                (step, q_nope, q_pe, rope, scales, answers, staged, ring, softmax_scale, keys.BOX),
            ),
            (_score, (step, staged, ring, scales)),
            (copy_tiles, (step, keys, scales, ring, 256)),
        ],
        [4, 4 if keys.BOX == 0 else 1],
        [120 if scales.SHARES > 1 else 104, 40 if keys.BOX == 0 else 24],
    )


@gluon.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["scales_ptr"])
def decode_tile_exact_kernel(
    work: Work,
    q_nope: Lines,  # [T, H, 512]
    q_pe: Lines,  # [T, H, 64]
    rope_tables: RopeTables,
    cache_ptr,  # e4m3 rows, as bytes; read if no box fits
    scales_ptr,  # float32 [] or [num_blocks, 1, G]; or the cache, if rows contain scales
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
    ckv_desc,  # int16 [cache rows, words of a row], in boxes [BOX, 256]
    k_pe_desc,  # the same tensor, in boxes [BOX, words of k_pe]
    tiles: Tiles,
    geometry: Geometry,
    scale_format: ScaleFormat,
    ROPE: gl.constexpr,  # "none", "interleaved" or "neox"
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
        softmax_scale,
    )  # fmt: skip
