"""How far an answer may be from the exact one: derived for every token, never tuned.

The oracle answers twice: exactly (float64), and rounded where the specification rounds
(scores and lse to float32, weights and outputs to the problem's dtype). A correct
implementation rounds in the same places in another order, so it may be twice as far
from the exact answer, plus what the rounded oracle cannot show by chance:

* one ulp of the output type at the token's largest output;
* the float32 error of a dot product summed in any order. A sum of n products computed
  with unit roundoff u is off by about ``sqrt(n) u sum|x y|`` (Higham and Mary 2019, "A new
  approach to probabilistic rounding error analysis"); the factor 4 makes it a bound
  that a run of millions of dot products keeps;
* an ulp of one rotated element, of the query or of a key, times what it meets (S-12): where
  float32 arithmetic comes near the middle of two numbers, either may be taken. One element of
  float16 in some thousands is that near, one of bfloat16 in some ten thousands: two in a query are
  not allowed for;
* the float32 error of summing a row's weights, and its weighted values, in any order. The k-th of n
  additions rounds a partial sum of about k/n of the whole, by u / sqrt(3) of it on average, so that
  the sum is off by ``sqrt(n) u / 3`` of it on average. Six times that is ``2 sqrt(n) u``.

What a cache holds is taken as it is: the oracle reads the same bytes, so a format costs nothing
here. Products of 8 bits have a class of their own (:mod:`paged_mla_reference.tolerance.fast`).

Materialized attention rounds in the same places; its keys and values come rounded. Where both
forms are held against one answer, exact from latents and weights, the rounded oracle also rounds
what each form hands on: ``k_nope`` and ``v``, or absorbed queries and the mean of latents
(:mod:`paged_mla_reference.rules.absorb`).

Rule ids: S-5, S-6, S-7, S-8, S-12, S-21.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.rounding import ulp
from paged_mla_shared.problem import Output

_UNIT_ROUNDOFF = 2.0**-24  # float32
_DOT_CONFIDENCE = 4.0
_SUM_CONFIDENCE = 2.0
_LSE_ULPS = 4
_ROTATION_ROUNDINGS = 4  # two factors, two products; the sum's own is within the ulp


def score_error(exact: Answer, terms: int) -> NDArray[np.float64]:
    """Return the error bound of each query's scores, sums of so many products, [T, H]."""
    of_sums = _DOT_CONFIDENCE * math.sqrt(terms) * _UNIT_ROUNDOFF * exact.score_bound
    return np.asarray(of_sums + exact.turn_error)


def sum_error(keys: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return the float32 error of sums over that many keys, relative to the terms' sum, [T]."""
    return np.asarray(_SUM_CONFIDENCE * np.sqrt(keys) * _UNIT_ROUNDOFF)


def out_budget(
    dtype: str, exact: Answer, rounded: Answer, keys: NDArray[np.integer[Any]], terms: int
) -> NDArray[np.float64]:
    """Return the largest allowed |out - exact| of each token, [T].

    Parameters
    ----------
    dtype : str
        Of out.
    exact, rounded : Answer
    keys : int [T]
        Of each token's row.
    terms : int
        Products that a score sums.
    """
    distance = _largest(np.abs(rounded.out - exact.out))  # [T]
    floor = ulp(_largest(np.abs(exact.out)), dtype)
    weights = (2 * score_error(exact, terms) + sum_error(keys)[:, None]) * exact.value_bound
    return 2 * distance + floor + _largest(weights)  # weights [T, H]


def gain_budget(dtype: str, rounded: float, bias: float, deviation: float) -> float:
    """Return how far a mean gain may be from 0, given the rounded oracle's."""
    own = 2 * abs(rounded) + float(ulp(np.ones(()), dtype))
    return own + bias + _DOT_CONFIDENCE * deviation


def lse_budget(
    exact: Answer, rounded: Answer, keys: NDArray[np.integer[Any]], terms: int
) -> NDArray[np.float64]:
    """Return the largest allowed |lse - exact| of each query, [T, H]; 0 where lse is -inf."""
    seen = np.isfinite(exact.lse)
    exact_lse = np.where(seen, exact.lse, 0.0)
    distance = _largest(np.abs(np.where(seen, rounded.lse, 0.0) - exact_lse))[:, None]
    floor = _LSE_ULPS * ulp(np.abs(exact_lse), "float32")
    error = score_error(exact, terms) + sum_error(keys)[:, None]
    return np.where(seen, 2 * distance + floor + error, 0.0)


def rotation_budget(rotated: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the allowed |k_pe - exact| of rotated keys [..., P] (S-12).

    One ulp of the stored type, plus the float32 error of ``x cos - y sin``: a few roundings of
    numbers no larger than the pair's length, which is at most sqrt(2) times the key's largest
    element.
    """
    largest = np.abs(rotated).max(axis=-1, keepdims=True)
    error = _ROTATION_ROUNDINGS * math.sqrt(2) * _UNIT_ROUNDOFF * largest
    return np.asarray(ulp(np.abs(rotated), dtype) + error)


def most_turned(count: int) -> int:
    """Return how many of `count` rotated elements may be rounded otherwise at once (S-12).

    Of 8 and 16 bits: the float32 error of a rotation reaches the middle between two of their
    numbers for one element in some hundreds. More than an eighth are rounded by another rule.
    """
    return count // 8 + 2


def merge_budget(partials: list[Output]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the allowed errors of a float32 merge: out [T, H], lse [T, H] (S-8).

    Each weight ``exp(lse_i - lse)`` carries the rounding of a difference of size up to
    ``max|lse|`` and a few operations of its own.
    """
    lses = np.stack([p.lse for p in partials]).astype(np.float64)  # [n, T, H]
    seen = np.isfinite(lses)
    spread = np.where(seen, np.abs(lses), 0.0).max(axis=0)  # [T, H]
    values = np.stack([np.abs(np.nan_to_num(p.out)).max(axis=-1) for p in partials])
    largest = np.where(seen, values, 0.0).max(axis=0)
    relative = _UNIT_ROUNDOFF * (8 + 2 * spread) * len(partials)
    return relative * largest, relative + _LSE_ULPS * ulp(spread, "float32")


@dataclass(frozen=True)
class Part:
    """A backend's answer over some of the keys: the exact one, and the budgets it kept.

    Parameters
    ----------
    answer : Output
    exact : Answer
    out : float64 [T]
    lse : float64 [T, H]
    """

    answer: Output
    exact: Answer
    out: NDArray[np.float64]
    lse: NDArray[np.float64]


def chunk_budget(parts: list[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return how far a merge of parts may be from the whole: out [T], lse [T, H] (S-8, S-21).

    A mean of outputs is off by no more than the worst of them; an lse that is off by e moves the
    weights by a factor of at most exp(2 e), and with them a mean of values no larger than the
    largest. The merge itself is one of float32 partials.
    """
    lse = np.max([part.lse for part in parts], axis=0)  # [T, H]
    values = np.max([part.exact.value_bound for part in parts], axis=0)  # [T, H]
    partials = [Output(p.answer.out.astype(np.float32), p.answer.lse) for p in parts]
    merged_out, merged_lse = merge_budget(partials)
    moved = _largest(np.expm1(2 * lse) * values + merged_out)
    return np.max([part.out for part in parts], axis=0) + moved, lse + merged_lse


def parts_budget(
    dtype: str,
    exact: Answer,
    allowed: tuple[NDArray[np.float64], NDArray[np.float64]],
    parts: int,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return what is `allowed` once an answer may have been merged of so many unknown parts (S-8).

    As :func:`chunk_budget`, where only the whole is known: a part's values are no larger than the
    largest, of which its rounded weights and its rounded output lose half an ulp each.
    """
    out, lse = allowed
    spread = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0.0)  # [T, H]
    relative = _UNIT_ROUNDOFF * (8 + 2 * spread) * parts
    moved = _largest((np.expm1(2 * lse) + relative) * exact.value_bound)
    rounded = ulp(_largest(exact.value_bound), dtype)
    return out + moved + rounded, lse + relative + _LSE_ULPS * ulp(spread, "float32")


def _largest(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the maximum over all axes but the first, 0 for no elements."""
    flat = values.reshape(len(values), -1) if values.size else np.zeros((len(values), 1))
    largest: NDArray[np.float64] = flat.max(axis=1)
    return largest
