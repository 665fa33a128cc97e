"""Check of queries that see one value and must return it (S-22); derivation of its exact bits.

Softmax gives each of n equal keys the weight 1 / n. Kernels compute ``sum w_j v / sum w_j`` with
weights ``w = exp(s - peak)``, and both sums are n times the same weight, if the weight is the same
in both. If the peak is the highest score, this weight is 1, which every type holds. Then:

* The numerator is ``n v``. It is exact in float32 if ``n 2^p <= 2^24``, where p is the number of
  significant bits of the type of ``v``.
* The denominator is n.
* The residue of ``s - peak`` may not be 0: a fused multiply-add does not round the score, but the
  peak was rounded to float32. The residue is up to ``u |s|`` for the scale of the score, and up to
  ``u |s|`` for the peak. It changes a weight, and the sum of weights, by the same relative amount.
  A weight that is rounded to 16 bits is still 1 if the residue is below half an ulp.
* Some float32 operations follow the sums: a reciprocal, a product, a scale, a merge of splits.

So ``out`` is between the roundings of ``v (1 - e)`` and ``v (1 + e)``, where e is a few times
``u``. In a 16-bit type both roundings are the same number, the value itself. In 16 bits the weights
of n keys differ from 1 by their residues, which behave like random numbers, and the sum of weights
differs by ``sqrt(n) u``. In float32 no bits are exact: an algorithm may use the rounded weight
``1 / n`` for each key, and a sum of n equal terms is rounded in the same direction at many steps,
so that its error may grow to ``n u``. There are two such sums.

This determines whether weights and denominator must be rounded in the same way. If the largest
weight is 1, the denominator may sum the weights before or after their rounding, because the weight
1 of equal keys does not change. With a peak above the highest score this does not hold. The weight
is then not a power of two, the 16-bit product uses the rounded weight, and only a sum of rounded
weights cancels the rounding. Such sums need a second conversion of each weight. They make the lse
wrong unless the lse has a separate sum, and they leave the largest weight rounded if keys differ
(:mod:`paged_mla_reference.tolerance.short`). Weights that are divided by their sum before they are
rounded have the same problem: three times a third, rounded, is not 1.

An 8-bit cache with exact products holds codes times scales. One common scale is a factor that
follows the sums, and ``v (1 + e)`` is rounded once. If tokens or parts of a latent have their own
scales, a kernel may first round a decoded value, or the weight times the scale, to 16 bits. This
changes the value by another unit roundoff, unless the scales are powers of two.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.cache import read_keys
from paged_mla_reference.rules.paging import keys_of_tokens, query_spans, slots_of
from paged_mla_reference.rules.prefill import key_spans, sees
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.tolerance.compare import Check, Mismatch, first
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Output, Problem

_UNIT_ROUNDOFF = 2.0**-24  # float32
_MANTISSA_BITS = {"bfloat16": 8, "float16": 11}  # of the types to which weights are rounded
_RESIDUES = 2  # of the score's scale and of the peak
_OPERATIONS = 8  # float32 operations after the sums


def equal_values(
    problem: Problem, batch: Batch, image: CacheImage, seen: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return how many keys each query token sees if all these keys are equal, and 0 otherwise.

    Parameters
    ----------
    problem, batch : Problem, Batch
    image : CacheImage
        The cache that attention reads.
    seen : int [T]
        How many keys each query sees (:func:`paged_mla_reference.rules.masks.keys_seen`).

    Returns
    -------
    int64 [T]
        A query that sees several keys counts only if all keys of its row are equal.
    """
    counts = np.where(seen == 1, 1, 0)
    spans = query_spans(batch)
    several = [row for row, span in enumerate(spans) if seen[span].max(initial=0) > 1]
    for row in _begin_with_equal_keys(problem, batch, image, several):
        positions = np.arange(batch.seq_lens[row])
        keys = read_keys(image, slots_of(batch.block_table[row], positions, problem.block_size))
        if (keys == keys[0]).all():
            counts[spans[row]] = seen[spans[row]]
    return counts


def keys_of_sums(problem: Problem, batch: Batch, counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers of keys for the budget of sums in S-5 and S-7, int64 [T].

    The error of a sum over n different keys grows like ``sqrt(n) u``. In float32 a sum over n equal
    keys may have the error ``n u``, so the number of its keys is squared.

    Parameters
    ----------
    problem, batch : Problem, Batch
    counts : int [T]
        The result of :func:`equal_values`.
    """
    keys = keys_of_tokens(batch)
    return keys if problem.dtype != "float32" else np.where(counts > 1, counts**2, keys)


def lone_keys(batch: PrefillBatch) -> NDArray[np.int64]:
    """Return 1 for each query token of a prefill that sees one key and 0 for the others, [T]."""
    lone = np.zeros(batch.num_tokens, np.int64)
    for queries, keys in zip(query_spans(batch), key_spans(batch), strict=True):
        seen = sees(queries.stop - queries.start, keys.stop - keys.start, causal=batch.causal)
        lone[queries] = seen.sum(axis=1) == 1
    return lone


def _begin_with_equal_keys(
    problem: Problem, batch: Batch, image: CacheImage, rows: list[int]
) -> list[int]:
    """Return which of some rows begin with two equal keys; in most rows these differ."""
    if not rows:
        return []
    first = [slots_of(batch.block_table[row], np.arange(2), problem.block_size) for row in rows]
    keys = read_keys(image, np.concatenate(first)).reshape(len(rows), 2, -1)
    equal = (keys[:, 0] == keys[:, 1]).all(axis=1)
    return [row for row, is_equal in zip(rows, equal, strict=True) if is_equal]


def _is_of_codes(value: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether values [n, H, R] are codes times powers of two, [n, H, 1].

    An e4m3 code has four significant bits. In a whole latent, only the product with a power of two
    keeps that number of bits.
    """
    mantissa, _ = np.frexp(value)
    return np.asarray((mantissa * 16 % 1 == 0).all(axis=-1, keepdims=True))


def slack(problem: Problem, exact: Answer, counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the relative error e that is allowed for each query token, [T].

    It is infinite for tokens that need not return one value.

    Parameters
    ----------
    problem : Problem
    exact : Answer
    counts : int [T]
        The result of :func:`equal_values` or :func:`lone_keys`.
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
    """Compare the outputs of queries that see one value with that value (S-22).

    Parameters
    ----------
    problem : Problem
    actual : Output
    exact : Answer
        NaN for tokens that the oracle did not compute; these tokens are not checked.
    counts : int [T]
        The result of :func:`equal_values` or :func:`lone_keys`.

    Returns
    -------
    list of Check
        Empty if no token is checked.

    Raises
    ------
    Mismatch
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
            f"{int(wrong.sum())} of {wrong.size} elements of queries that see one value differ "
            f"from it, first at {(int(held[token]), *at)}: {float(given):.8g}, the value is "
            f"{float(right):.8g}"
        )
        raise Mismatch("S-22", "out", detail, (int(held[token]), *at))
    return [Check("single value", 0.0, 0.0)]
