"""Error budgets: the largest allowed error of each token, derived and never tuned.

The oracle computes each output twice: exactly (float64), and rounded where the specification rounds
(scores and lse to float32, weights and outputs to the problem's dtype). A correct implementation
rounds at the same points but in another order, so its error may be twice the error of the rounded
oracle. The budget adds these errors, which the rounded oracle may not show by chance:

* one ulp of the output type at the token's largest output;
* the float32 error of a dot product that is summed in any order. The error of a sum of n products,
  computed with unit roundoff u, is about ``sqrt(n) u sum|x y|`` (Higham and Mary 2019, "A new
  approach to probabilistic rounding error analysis"). With the factor 4 it is a bound that holds
  for a run of millions of dot products;
* one ulp of one rotated element, of the query or of a key, times the element that multiplies it
  (S-12): if the exact value is near the midpoint of two numbers, float32 arithmetic may give either
  of them. About one float16 element in some thousands is that near, and one bfloat16 element in
  some ten thousands. The budget does not allow two of them in a query;
* the float32 error of sums of a row's weights, and of its weighted values, in any order. The k-th
  of n additions rounds a partial sum of about k/n of the total, and its mean error is u / sqrt(3)
  of that partial sum. The mean error of the total is therefore ``sqrt(n) u / 3``, relative to it.
  Six times this error is ``2 sqrt(n) u``.

The oracle reads the same cache bytes as the implementation, so a cache format adds nothing to the
budget. 8-bit products have separate budgets (:mod:`paged_mla_reference.tolerance.fast`).

Materialized attention rounds at the same points; its keys and values are already rounded. If both
forms are compared with one output that is exact from latents and weights, the rounded oracle also
rounds the intermediate results of each form: ``k_nope`` and ``v``, or the absorbed queries and the
mean of latents (:mod:`paged_mla_reference.rules.absorb`).

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
_ROTATION_ROUNDINGS = 4  # two factors, two products; the ulp covers the rounding of the sum


def score_error(exact: Answer, terms: int) -> NDArray[np.float64]:
    """Return the error bound of each query's scores, which are sums of `terms` products, [T, H]."""
    of_sums = _DOT_CONFIDENCE * math.sqrt(terms) * _UNIT_ROUNDOFF * exact.score_bound
    return np.asarray(of_sums + exact.turn_error)


def sum_error(keys: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return the float32 error of sums over `keys` terms, relative to the sum, [T]."""
    return np.asarray(_SUM_CONFIDENCE * np.sqrt(keys) * _UNIT_ROUNDOFF)


def out_budget(
    dtype: str, exact: Answer, rounded: Answer, keys: NDArray[np.integer[Any]], terms: int
) -> NDArray[np.float64]:
    """Return the largest allowed |out - exact| of each token, [T].

    Parameters
    ----------
    dtype : str
        The type of ``out``.
    exact, rounded : Answer
        The exact and the rounded output of the oracle.
    keys : int [T]
        Number of keys of each token's row.
    terms : int
        Number of products in a score.
    """
    distance = _largest(np.abs(rounded.out - exact.out))  # [T]
    floor = ulp(_largest(np.abs(exact.out)), dtype)
    weights = (2 * score_error(exact, terms) + sum_error(keys)[:, None]) * exact.value_bound
    return 2 * distance + floor + _largest(weights)  # weights [T, H]


def gain_budget(dtype: str, rounded: float, bias: float, deviation: float) -> float:
    """Return the largest allowed absolute value of a mean gain.

    Parameters
    ----------
    dtype : str
        The type of ``out``.
    rounded : float
        Mean gain of the rounded oracle.
    bias, deviation : float
        Largest bias and standard deviation of the mean gain.
    """
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

    The budget is one ulp of the stored type, plus the float32 error of ``x cos - y sin``. This
    error consists of a few roundings of numbers that are at most the pair's length. That length is
    at most sqrt(2) times the key's largest element.
    """
    largest = np.abs(rotated).max(axis=-1, keepdims=True)
    error = _ROTATION_ROUNDINGS * math.sqrt(2) * _UNIT_ROUNDOFF * largest
    return np.asarray(ulp(np.abs(rotated), dtype) + error)


def most_turned(count: int) -> int:
    """Return how many of `count` rotated elements may be rounded to their other neighbor (S-12).

    The limit is for 8-bit and 16-bit elements. The float32 error of a rotation reaches the midpoint
    between two of their numbers for less than one element in a thousand. If more than an eighth of
    the elements differ, the implementation does not round to nearest.
    """
    return count // 8 + 2


def merge_budget(partials: list[Output]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the allowed errors of a float32 merge: out [T, H], lse [T, H] (S-8).

    The error of each weight ``exp(lse_i - lse)`` comes from the rounding of a difference of size up
    to ``max|lse|``, and from a few further operations.
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
    """A backend's output over a part of the keys, with the exact output and its budgets.

    Parameters
    ----------
    answer : Output
        The output of the backend.
    exact : Answer
        The exact output over the same keys.
    out : float64 [T]
        Budget of ``out``.
    lse : float64 [T, H]
        Budget of ``lse``.
    """

    answer: Output
    exact: Answer
    out: NDArray[np.float64]
    lse: NDArray[np.float64]


def chunk_budget(parts: list[Part]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the allowed errors of merged parts: out [T], lse [T, H] (S-8, S-21).

    The error of a mean of outputs is at most the largest error of these outputs. An error e of an
    lse changes the weights by a factor of at most exp(2 e), and the mean of the values changes
    accordingly. The merge adds the error of merging float32 partial results.
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
    """Return the allowed errors of an output that may be merged from unknown parts (S-8).

    This is :func:`chunk_budget` for the case that only the exact output over all keys is known. The
    values of a part are at most the largest value; its rounded weights and its rounded output each
    add half an ulp of that value.

    Parameters
    ----------
    dtype : str
        The type of ``out``.
    exact : Answer
    allowed : float64 [T] and float64 [T, H]
        The allowed errors of ``out`` and ``lse`` without parts.
    parts : int
        Number of parts.

    Returns
    -------
    out : float64 [T]
    lse : float64 [T, H]
    """
    out, lse = allowed
    spread = np.where(np.isfinite(exact.lse), np.abs(exact.lse), 0.0)  # [T, H]
    relative = _UNIT_ROUNDOFF * (8 + 2 * spread) * parts
    moved = _largest((np.expm1(2 * lse) + relative) * exact.value_bound)
    rounded = ulp(_largest(exact.value_bound), dtype)
    return out + moved + rounded, lse + relative + _LSE_ULPS * ulp(spread, "float32")


def _largest(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the maximum over all axes except the first, 0 without elements, [n]."""
    flat = values.reshape(len(values), -1) if values.size else np.zeros((len(values), 1))
    largest: NDArray[np.float64] = flat.max(axis=1)
    return largest
