"""Peaks and sums of weights, which Hopper kernels keep while they walk key tiles, and the lse."""

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

FLOOR = gl.constexpr(-1e30)  # a finite peak: exp2 of -inf minus it is 0, never NaN
LAZY = gl.constexpr(8.0)  # weights may reach 2 ** 8 before the answers are rescaled

_TO_INTEGERS = gl.constexpr(1.5 * 2**23)  # float32 numbers near it are integers
_ALL_NAN = gl.constexpr(PropagateNan.ALL)
_LEAST_SCALE = gl.constexpr(2.0**-90)  # of a key whose scale bounds how far weights may rise


@gluon.jit
def higher(x, y):
    """Return the higher of two numbers, or NaN."""
    return gl.maximum(x, y, propagate_nan=_ALL_NAN)


@gluon.jit
def raised(peak, highest):
    """Return the peak that weights are relative to, once a tile's `highest` scores are known.

    It rises only where it must. A row's first peak is its highest score so far, so that the weight
    of a single key is 1, which no rounding changes.
    """
    return gl.where(highest > peak + LAZY, highest, peak)


@gluon.jit
def _in_both(is_so):
    """Return whether something [64] is so of either pair of a thread, for both."""
    either = gl.max(is_so.to(gl.int32).reshape([4, 2, 8]), 1)
    either = either[:, None, :].broadcast_to([4, 2, 8]).reshape([64])
    return gl.convert_layout(either, is_so.type.layout) != 0


@gluon.jit
def raise_peaks_pairwise(peak, highest, has_to):
    """Return peaks [64], all integers: both pairs of a thread rise if one of them has to.

    What is kept of the sums so far is then a power of two, which bfloat16 holds exactly. The
    weights of neither pair can be made before the highest scores of both are known: the compiler
    would otherwise take one pair after the other where registers are few, and wait for shuffles
    twice.
    """
    return gl.where(_in_both(has_to), higher(peak, gl.ceil(highest)), peak)


@gluon.jit
def raised_by_steps(peak, highest, scale):
    """Return peaks [64] behind a tile's `highest` scores, which `scale` has not multiplied yet.

    A first peak is the highest score itself, so that the weight of a single key is 1, and each
    later one is whole steps above the one before: what is kept of the sums so far is a power of
    two, which bfloat16 holds exactly. Steps are rounded by an addition, which is faster than an
    instruction that rounds. Both pairs of a thread rise if one of them has to: see
    ``raise_peaks_pairwise``.
    """
    steps = highest * scale + (_TO_INTEGERS - peak) - _TO_INTEGERS
    first = higher(highest * scale, FLOOR)
    risen = gl.where(peak == FLOOR, first, peak + higher(steps, 0.0))
    return gl.where(_in_both(steps >= LAZY), risen, peak)


@gluon.jit
def lift_of(scale):
    """Return how much sooner, in powers of two, a key's scores make the peak rise.

    An integer, from the bits of its `scale`. The weights of its codes are so below 2 ** 15, and
    float16 ends at 2 ** 16. Bounded from below, or the sum of weights could grow without bound
    beside small scales.
    """
    bounded = gl.maximum(scale, _LEAST_SCALE).to(gl.int32, bitcast=True)
    return ((bounded >> 23) - 126 - 6).to(gl.float32)


@gluon.jit
def own_sums(weights, OWN: gl.constexpr = 2):
    """Return the sums [64, 4] of what each thread holds of weights [64, N]: no shuffles.

    Four lanes hold the keys of a pair, OWN neighbours at a time.
    """
    return gl.sum(gl.sum(weights.reshape([64, weights.shape[1] // 4 // OWN, 4, OWN]), 3), 1)


@gluon.jit
def own_sums_at(total, pair):
    """Return where own sums [64, 4] lie in a state of the pairs that lie at `pair`."""
    own = gl.arange(0, 4, layout=gl.SliceLayout(0, total.type.layout))
    pair = gl.convert_layout(pair, gl.SliceLayout(1, total.type.layout))
    return (pair + 64)[:, None] * 512 + own[None, :]


@gluon.jit
def begin_weighing(step, segment, answers, layout: gl.constexpr, SUMS: gl.constexpr):
    """Return what the weighing of key tiles begins with.

    Returns
    -------
    peak : [64]
    totals : SUMS tensors [64, 4]
        Own sums of weights, which are [64, 64] in `layout`.
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
    """Leave what ``begin_weighing`` takes."""
    pair_layout: gl.constexpr = peak.type.layout
    pair = state_pairs(gl.program_id(0), 64, pair_layout)
    gl.store(answers.partial_lse_ptr + pair, peak)
    for number in gl.static_range(len(totals)):
        at = own_sums_at(totals[number], pair) + 4 * number
        gl.store(answers.partial_out_ptr + at, totals[number])
    state_stored(step, 0)


@gluon.jit
def answer_factor(is_empty, total, scale=1.0):
    """Return what sums of weighted values are multiplied by; 0 where no key was seen (S-6)."""
    return gl.where(is_empty, 0.0, scale / total)


@gluon.jit
def answer_lse(is_empty, peak, total):
    """Return the lse of scores; -inf where no key was seen (S-6)."""
    return gl.where(is_empty, float("-inf"), lse_of(peak, total))


@gluon.jit
def store_lse(step, segment, lse, answers, layout: gl.constexpr):
    """Store the lse of a query tile, or keep it as that of its partial."""
    if segment.is_whole:
        pairs = query_pairs(step, segment, layout)
        gl.store(line_ptr(answers.lse, pairs.token, pairs.head), lse, mask=pairs.live)
    else:
        at = partial_pairs(step, segment, layout)
        kept = kept_pairs(step, segment, layout)
        gl.store(answers.partial_lse_ptr + at, lse, mask=kept)
