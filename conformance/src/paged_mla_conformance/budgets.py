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
* the float32 error of summing a row's weights, and its weighted values, in any order. The k-th of n
  additions rounds a partial sum of about k/n of the whole, by u / sqrt(3) of it on average, so that
  the sum is off by ``sqrt(n) u / 3`` of it on average. Six times that is ``2 sqrt(n) u``.

What a cache holds is taken as it is: the oracle reads the same bytes, so a format costs nothing
here. Products of 8 bits have a class of their own (:mod:`paged_mla_conformance.fast`).

Rule ids: S-5, S-6, S-7, S-8.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import Answer
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.problem import Output, Problem

_UNIT_ROUNDOFF = 2.0**-24  # float32
_DOT_CONFIDENCE = 4.0
_SUM_CONFIDENCE = 2.0
_LSE_ULPS = 4
_ROTATION_ROUNDINGS = 4  # two factors, two products; the sum's own is within the ulp


def ulp(magnitude: NDArray[np.float64], dtype: str) -> NDArray[np.float64]:
    """Return the spacing of `dtype` at each magnitude."""
    info = ml_dtypes.finfo(numpy_dtype(dtype))  # type: ignore[no-untyped-call]  # ml_dtypes has no types
    exponent = np.floor(np.log2(np.maximum(magnitude, float(info.smallest_normal))))
    return np.asarray(np.exp2(exponent) * float(info.eps), np.float64)


def score_error(problem: Problem, exact: Answer) -> NDArray[np.float64]:
    """Return the float32 error bound of each query's scores, [T, H]."""
    terms = problem.dims.cached_dim
    return np.asarray(_DOT_CONFIDENCE * math.sqrt(terms) * _UNIT_ROUNDOFF * exact.score_bound)


def sum_error(keys: NDArray[np.integer[Any]]) -> NDArray[np.float64]:
    """Return the float32 error of sums over that many keys, relative to the terms' sum, [T]."""
    return np.asarray(_SUM_CONFIDENCE * np.sqrt(keys) * _UNIT_ROUNDOFF)


def out_budget(
    problem: Problem, exact: Answer, rounded: Answer, keys: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return the largest allowed |out - exact| of each token, [T], whose rows have `keys` [T]."""
    distance = _largest(np.abs(rounded.out - exact.out))  # [T]
    floor = ulp(_largest(np.abs(exact.out)), problem.dtype)
    weights = (2 * score_error(problem, exact) + sum_error(keys)[:, None]) * exact.value_bound
    return 2 * distance + floor + _largest(weights)  # weights [T, H]


def lse_budget(
    problem: Problem, exact: Answer, rounded: Answer, keys: NDArray[np.integer[Any]]
) -> NDArray[np.float64]:
    """Return the largest allowed |lse - exact| of each query, [T, H]; 0 where lse is -inf."""
    seen = np.isfinite(exact.lse)
    exact_lse = np.where(seen, exact.lse, 0.0)
    distance = _largest(np.abs(np.where(seen, rounded.lse, 0.0) - exact_lse))[:, None]
    floor = _LSE_ULPS * ulp(np.abs(exact_lse), "float32")
    error = score_error(problem, exact) + sum_error(keys)[:, None]
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


def _largest(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the maximum over all axes but the first, 0 for no elements."""
    flat = values.reshape(len(values), -1) if values.size else np.zeros((len(values), 1))
    largest: NDArray[np.float64] = flat.max(axis=1)
    return largest
