"""A query that sees one value has that value for its answer (S-22): where bits are exact, and why.

Softmax gives n equal keys the weight 1 / n each. Kernels compute ``sum w_j v / sum w_j`` with
weights ``w = exp(s - peak)``, and both sums are n times the same weight, if the weight is the same
in both. It is 1, which every type holds, where the peak is the highest score. Then

* the numerator is ``n v``: exact in float32 while ``n`` times the 2^p mantissas of a type of p bits
  fits its 24;
* the denominator is n;
* what remains is the residue of ``s - peak``: a fused multiply-add does not round the score, but
  the peak was rounded to float32. That leaves up to ``u |s|``, once for the score's own scale and
  once for the peak. It moves a weight by that much, and the sum of weights with it. Rounded to 16
  bits the weight is 1 all the same while the residue is below half an ulp;
* some float32 operations behind the sums: a reciprocal, a product, a scale, a merge of splits.

So ``out`` lies between the roundings of ``v (1 - e)`` and ``v (1 + e)``, where e is a few times
``u``: for what a 16-bit type holds that is one number, the value itself. In 16 bits the weights of
n keys differ from 1 by their residues, as good as random, and their sum by ``sqrt(n) u``.
In float32 nothing is exact: an algorithm may weigh each key ``1 / n``, rounded, and a sum of n
equal terms is rounded the same way at many steps, so that its error may grow to ``n u``. There are
two sums.

Which of weights and denominator have to be rounded alike follows from this. Where the largest
weight is 1 the denominator may sum the weights as they were or as they were rounded: equal keys
all weigh 1, which is both. A peak above the highest score breaks this. The weight is no power of
two then, the 16-bit product takes it rounded, and only a sum of rounded weights cancels that. Such
sums cost a second conversion of each weight, spoil the lse unless it has a sum of its own, and
leave the largest weight rounded where keys differ (:mod:`paged_mla_reference.tolerance.short`). The
same goes for weights that are divided by their sum before they are rounded: three times a third,
rounded, is not 1.

Caches of 8 bits under exact products hold codes times scales. One scale for all is a factor
behind the sums, and ``v (1 + e)`` is rounded once. Where tokens or parts of a latent have scales of
their own, a kernel may round a decoded value, or the weight that has taken up its scale, to 16 bits
first: the value moves by its unit roundoff more, unless the scales are powers of two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.cache import read_slots
from paged_mla_reference.rules.paging import query_spans, slots_of
from paged_mla_reference.rules.prefill import key_spans, sees
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.tolerance.compare import Check, Mismatch, first
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Output, Problem

_UNIT_ROUNDOFF = 2.0**-24  # float32
_MANTISSA_BITS = {"bfloat16": 8, "float16": 11}  # of types that weights are rounded to
_RESIDUES = 2  # of the score's scale and of the peak
_OPERATIONS = 8  # float32 ones behind the sums


def equal_values(
    problem: Problem, batch: Batch, image: CacheImage, seen: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many keys each query token sees, [T]; 0 where they are not all the same.

    Parameters
    ----------
    problem, batch : Problem, Batch
    image : CacheImage
        As attention reads it.
    seen : int [T]
        How many keys each query sees (:func:`paged_mla_reference.rules.masks.keys_seen`).
    """
    counts = np.where(seen == 1, 1, 0)
    for row, span in enumerate(query_spans(batch)):
        if seen[span].max(initial=0) > 1 and _is_one_key(problem, batch, image, row):
            counts[span] = seen[span]
    return counts


def lone_keys(batch: PrefillBatch) -> NDArray[np.int64]:
    """Return 1 for each query token of a prefill that sees one key, 0 for the others, [T]."""
    lone = np.zeros(batch.num_tokens, np.int64)
    for queries, keys in zip(query_spans(batch), key_spans(batch), strict=True):
        seen = sees(queries.stop - queries.start, keys.stop - keys.start, causal=batch.causal)
        lone[queries] = seen.sum(axis=1) == 1
    return lone


def _is_one_key(problem: Problem, batch: Batch, image: CacheImage, row: int) -> bool:
    """Return whether all keys of a row are the same, bit for bit."""
    length = int(batch.seq_lens[row])
    for some in (min(2, length), length):  # most rows differ in their first two
        slots = slots_of(batch.block_table[row], np.arange(some), problem.block_size)
        keys = np.hstack(read_slots(image, slots), dtype=np.float64)
        if not (keys == keys[0]).all():
            return False
    return True


def _is_of_codes(value: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether values [n, H, R] are codes times powers of two, [n, H, 1].

    A code of e4m3 has four significant bits. Of a whole latent only a power of two leaves that.
    """
    mantissa, _ = np.frexp(value)
    return np.asarray((mantissa * 16 % 1 == 0).all(axis=-1, keepdims=True))


def slack(problem: Problem, exact: Answer, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return e of each query token, [T]; infinite where a value need not come back.

    Parameters
    ----------
    problem : Problem
    exact : Answer
    counts : int [T]
        As :func:`equal_values` returns them.
    """
    residue = _RESIDUES * _UNIT_ROUNDOFF * exact.score_bound.max(axis=1, initial=0.0)
    is_held = counts > 0
    bits = _MANTISSA_BITS.get(problem.dtype)
    of_sums = 2 * (np.sqrt(counts) if bits else counts)
    e = residue + (_OPERATIONS + of_sums) * _UNIT_ROUNDOFF
    if bits:
        is_held &= (residue < 2.0 ** -(bits + 1)) & (counts * 2.0**bits <= 2.0**24)
    return np.where(is_held, e, np.inf)


def check_single(
    problem: Problem, actual: Output, exact: Answer, counts: NDArray[np.int64]
) -> list[Check]:
    """Hold the answers of queries that see one value against that value (S-22).

    Parameters
    ----------
    problem : Problem
    actual : Output
    exact : Answer
        NaN where the oracle was not asked: such tokens are not held.
    counts : int [T]
        As :func:`equal_values` or :func:`lone_keys` returns them.
    """
    e = slack(problem, exact, counts)
    held = np.flatnonzero(np.isfinite(e) & np.isfinite(exact.out).all(axis=(1, 2)))
    if not held.size:
        return []
    out, value = widen(actual.out[held]), exact.out[held]
    moved = np.abs(value) * e[held, None, None]
    if FORMATS[problem.cache_format].has_own_scales:
        unit = 2.0 ** -_MANTISSA_BITS.get(problem.dtype, 24)
        moved += np.where(_is_of_codes(value), 0.0, np.abs(value) * unit)
    least, most = (widen(round_to(value + x, problem.dtype)) for x in (-moved, moved))
    wrong = ~((least <= out) & (out <= most))
    if wrong.any():
        token, *at = first(wrong)
        given, right = out[(token, *at)], widen(round_to(value[(token, *at)], problem.dtype))
        detail = (
            f"{int(wrong.sum())} of {wrong.size} elements of queries that see one value are "
            f"another, first at {(int(held[token]), *at)}: {float(given):.8g}, the value is "
            f"{float(right):.8g}"
        )
        raise Mismatch("S-22", "out", detail, (int(held[token]), *at))
    return [Check("single value", 0.0, 0.0)]
