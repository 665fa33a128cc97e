"""Peaks and sums of weights of the Hopper kernels, and the lse.

The *peak* of a pair is the number that is subtracted from its scores, in units of log2. It rises
lazily: only when a score exceeds it by more than LAZY. *Own sums* are the sums of the weights that
one thread holds; threads add them up only once a segment.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from paged_mla_optimized.kernels.common.logarithms import lse_of
from paged_mla_optimized.kernels.common.token_head import line_ptr
from paged_mla_optimized.kernels.hopper.pairs import (
    kept_pairs,
    partial_pairs,
    query_pairs,
    state_pairs,
    state_stored,
    taken_pairs,
)

FLOOR = gl.constexpr(-1e30)  # a finite first peak: exp2(-inf - FLOOR) is 0, not NaN
LAZY = gl.constexpr(8.0)  # weights may reach 2 ** 8 before the outputs are rescaled

_TO_INTEGERS = gl.constexpr(1.5 * 2**23)  # float32 numbers near it are integers
_ALL_NAN = gl.constexpr(PropagateNan.ALL)
_LEAST_SCALE = gl.constexpr(2.0**-90)  # smaller scales of keys count as this in ``lift_of``


@gluon.jit
def higher(x, y):
    """Return the higher of two numbers; NaN if one of them is NaN."""
    return gl.maximum(x, y, propagate_nan=_ALL_NAN)


@gluon.jit
def raised(peak, highest):
    """Return the peak of each pair after a key tile with the `highest` scores.

    The peak rises only if the highest score exceeds it by more than LAZY. The first peak is the
    highest score of the first tile, so that the weight of a single key is exactly 1.
    """
    return gl.where(highest > peak + LAZY, highest, peak)


@gluon.jit
def _in_both(is_so):
    """Return, for both pairs of a thread, whether `is_so` [64] is true for either of them."""
    either = gl.max(is_so.to(gl.int32).reshape([4, 2, 8]), 1)
    either = either[:, None, :].broadcast_to([4, 2, 8]).reshape([64])
    return gl.convert_layout(either, is_so.type.layout) != 0


@gluon.jit
def raise_peaks_pairwise(peak, highest, has_to):
    """Return peaks [64], which are integers; both pairs of a thread rise if one of them must.

    The factor of the sums so far is then a power of two. The weights of each pair depend on the
    highest scores of both pairs. Otherwise the compiler would process one pair after the other if
    registers are scarce, and would wait for shuffles twice.
    """
    return gl.where(_in_both(has_to), higher(peak, gl.ceil(highest)), peak)


@gluon.jit
def raised_by_steps(peak, highest, scale):
    """Return peaks [64] after a tile with the `highest` scores, which `scale` has yet to multiply.

    The first peak is the highest score itself, so that the weight of a single key is 1. Each later
    peak is a whole number of steps above the one before. The factor of the sums so far is then a
    power of two, which bfloat16 represents exactly. An addition rounds the steps, because it is
    faster than a rounding instruction. Both pairs of a thread rise if one of them must, as in
    ``raise_peaks_pairwise``.
    """
    steps = highest * scale + (_TO_INTEGERS - peak) - _TO_INTEGERS
    first = higher(highest * scale, FLOOR)
    risen = gl.where(peak == FLOOR, first, peak + higher(steps, 0.0))
    return gl.where(_in_both(steps >= LAZY), risen, peak)


@gluon.jit
def lift_of(scale):
    """Return the lift of each key, an integer that follows from the bits of its `scale`.

    A peak rises if a score plus the lift exceeds it by more than LAZY. So the weight times the
    scale is below 2 ** 15, and float16 ends at 2 ** 16. The scale is bounded from below. Otherwise
    the sum of weights could grow without bound if scales are small.
    """
    bounded = gl.maximum(scale, _LEAST_SCALE).to(gl.int32, bitcast=True)
    return ((bounded >> 23) - 126 - 6).to(gl.float32)


@gluon.jit
def own_sums(weights, OWN: gl.constexpr = 2):
    """Return own sums [64, 4] of weights [64, N]; this needs no shuffles.

    Four lanes hold the keys of a pair, OWN neighboring keys at a time.
    """
    return gl.sum(gl.sum(weights.reshape([64, weights.shape[1] // 4 // OWN, 4, OWN]), 3), 1)


@gluon.jit
def own_sums_at(total, pair):
    """Return the offsets of own sums [64, 4] in a state whose pairs have the indices `pair`."""
    own = gl.arange(0, 4, layout=gl.SliceLayout(0, total.type.layout))
    pair = gl.convert_layout(pair, gl.SliceLayout(1, total.type.layout))
    return (pair + 64)[:, None] * 512 + own[None, :]


@gluon.jit
def begin_weighing(step, segment, answers, layout: gl.constexpr, SUMS: gl.constexpr):
    """Return the peaks and sums with which a segment starts: those of a state if it resumes one.

    Returns
    -------
    peak : [64]
    totals : SUMS tensors [64, 4]
        Own sums of weights; the weights are [64, 64] in `layout`.
    """
    pair_layout: gl.constexpr = gl.SliceLayout(1, layout)
    peak = gl.full([64], FLOOR, gl.float32, pair_layout)
    totals = ()
    for _sum in gl.static_range(SUMS):
        totals += (own_sums(gl.zeros([64, 64], gl.float32, layout)),)
    if step.FIXED_SPLITS > 0:
        if segment.resumes:
            pair = taken_pairs(step, 0, pair_layout)
            peak = gl.load(answers.partial_lse_ptr + pair)
            taken = ()
            for number in gl.static_range(SUMS):
                at = own_sums_at(totals[number], pair) + 4 * number
                taken += (gl.load(answers.partial_out_ptr + at),)
            totals = taken
    return peak, totals


@gluon.jit
def leave_weighing(step, peak, totals, answers):
    """Store the state that ``begin_weighing`` loads."""
    pair_layout: gl.constexpr = peak.type.layout
    pair = state_pairs(gl.program_id(0), 64, pair_layout)
    gl.store(answers.partial_lse_ptr + pair, peak)
    for number in gl.static_range(len(totals)):
        at = own_sums_at(totals[number], pair) + 4 * number
        gl.store(answers.partial_out_ptr + at, totals[number])
    state_stored(step, 0)


@gluon.jit
def answer_factor(is_empty, total, scale=1.0):
    """Return the factor of the sums of weighted values; 0 if the query sees no key (S-6)."""
    return gl.where(is_empty, 0.0, scale / total)


@gluon.jit
def answer_lse(is_empty, peak, total):
    """Return the lse of the scores; -inf if the query sees no key (S-6)."""
    return gl.where(is_empty, float("-inf"), lse_of(peak, total))


@gluon.jit
def store_lse(step, segment, lse, answers, layout: gl.constexpr):
    """Store the lse of a query tile, or the lse of its partial result."""
    if segment.is_whole:
        pairs = query_pairs(step, segment, layout)
        gl.store(line_ptr(answers.lse, pairs.token, pairs.head), lse, mask=pairs.live)
    else:
        at = partial_pairs(step, segment, layout)
        kept = kept_pairs(step, segment, layout)
        gl.store(answers.partial_lse_ptr + at, lse, mask=kept)
