"""Error budgets of 8-bit products, for backends that declare them.

A backend with ``products="fast"`` may round queries, and the weights that multiply the values, to
e4m3 before it multiplies them with cached e4m3 codes. Its sums stay in float32. It scales each
query, for each head, so that no element exceeds 448 and no significant element is subnormal. It
scales the weights so that the largest weight is 2^7 or more. It may divide by the sum of the
weights before or after their rounding. It may round partial results over parts of a row's keys to
the type of the output before it merges them. The budget has no term for that, because this rounding
is small compared with the roundings to e4m3.

Rounding x to e4m3 has an error of at most 2^-4 |x|. The elements of a query have all sizes, so
their errors are evenly distributed: their standard deviation is at most ``u |x|`` with
u = 2^-4 / sqrt(3). The weights of a row may be equal, and all may be midway between two numbers.
The deviation of their errors is at most ``w |x|`` with w = 2^-4, as for any error of that size. The
derivation assumes that elements round independently. This is wrong for equal weights that are
midway: the signs of their errors depend on the scores, and therefore on the keys, which is visible
if a latent has few columns. To first order:

* The error of the score of key j is ``d_j``. Its deviation is ``u scale |q * k_j|`` (the norm of
  the elementwise product); the largest of these deviations is ``z``.
* The error of lse is ``sum p_j d_j``. Its deviation is ``u scale |q * mean key|``, and the error is
  at most the largest ``|d_j|`` in any case. The terms of higher order are at most ``max|d|^2 / 2``
  (Hoeffding's lemma). If lse is computed from the sum of rounded weights, they add ``w |p|``.
* The error of out is ``sum p_j d_j (v_j - out)`` for the scores and ``sum p_j e_j v_j`` for the
  weights. The deviations are ``z |p (v - out)|`` and ``w |p v|``, with norms over keys. Errors of
  scores that all keys share do not average out. The budget covers them by twice the error of an
  oracle that rounds at the same points, which it contains in any case.

The budget allows four deviations, as for sums in float32. If four deviations of a score exceed 1,
another key may have the largest weight. The error of out may then be twice the largest value.

Each element may have an error of that size, but not all elements with the same sign. The **gain**
of an output is its relative change in the direction of the exact output,
``(out - exact) * exact / |exact|^2``, where ``*`` is the inner product. With
``a_j = (v_j - exact) * exact / |exact|^2``, rounding causes these gains:

* Scores: all errors come from the errors of one query. To first order the gain is
  ``sum p_j d_j a_j``, with deviation ``u scale |q sum p_j a_j k_j|`` (an elementwise product).
* To second order the gain is ``sum p_j a_j d_j^2 / 2 - sum p_j d_j sum p_j a_j d_j``. Its mean and
  its deviation are at most ``b = 3/2 z^2 sum p_j |a_j|``, where z is the largest deviation of a
  score.
* Weights: if the denominator sums the weights before their rounding, the gain is
  ``sum p_j e_j (1 + a_j)``, with deviation ``w |p (1 + a)|``. It is smaller if the denominator sums
  rounded weights.

The check takes the mean of a step's gains, each weighted by the inverse of its variance. This mean
may be at most the sum of four of its deviations, the mean of b, twice the mean gain of the rounded
oracle, and one ulp of 1 for the rounding of the output. Queries whose score may have an error above
1 are not counted.

Rule ids: S-5, S-7.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer, QueryAnswer, attend_one, attend_visible
from paged_mla_reference.rules.e4m3 import LARGEST, decode, encode
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

Array = NDArray[np.float64]

_DEVIATION = 2.0**-4 / math.sqrt(3)  # relative deviation of elements of queries
_OF_WEIGHTS = 2.0**-4  # relative deviation of weights
_CONFIDENCE = 4.0
_WEIGHT_SCALE = 2.0**8


@dataclass(frozen=True)
class Allowance:
    """The errors that rounding to 8 bits adds to the budgets of a step.

    Parameters
    ----------
    out : float64 [T, H, R]
        0 for queries that see no key.
    lse : float64 [T, H]
        0 for queries that see no key.
    gain : float64 [T, H]
        Deviation of the gain. It is infinite for queries that see no key or whose exact output is
        0, and for queries in which rounding may give another key the largest weight.
    bias : float64 [T, H]
        Largest absolute value of the gain's mean; 0 for queries that see no key.
    """

    out: Array
    lse: Array
    gain: Array
    bias: Array

    def of_tokens(self, tokens: NDArray[np.int64]) -> Allowance:
        """Return the allowance of `tokens`."""
        return Allowance(self.out[tokens], self.lse[tokens], self.gain[tokens], self.bias[tokens])


def gain_of(out: Array, exact: Array) -> Array:
    """Return the gain of `out` relative to `exact` [.., R], [..]; 0 where `exact` is 0."""
    squared = (exact**2).sum(axis=-1)
    along = ((out - exact) * exact).sum(axis=-1)
    return np.asarray(np.divide(along, squared, out=np.zeros_like(squared), where=squared > 0))


def may_be_fast(problem: Problem, products: str) -> bool:
    """Return whether a backend with these `products` may round factors of cached codes to e4m3."""
    return products == "fast" and FORMATS[problem.cache_format].ckv_dtype == "float8_e4m3"


def fast_answers(
    problem: Problem, batch: Batch, image: CacheImage, asked: NDArray[np.bool_] | None = None
) -> tuple[Answer, Allowance]:
    """Return the output with 8-bit products, and the errors that these products may add.

    Parameters
    ----------
    problem : Problem
    batch : Batch
    image : CacheImage
    asked : bool [T], optional
        The query tokens to compute, all of them by default. ``out`` and ``lse`` of the other tokens
        are NaN in both results, unless the token sees no key.
    """
    visible = visibility(problem, batch)
    rounded, allowed = (
        attend_visible(
            problem, batch, image, visible, Rounding.SPEC, asked=asked, attend_query=attend_query
        )
        for attend_query in (_attend_in_e4m3, _allow)
    )
    allowed.lse[np.isneginf(allowed.lse)] = 0
    # `_allow` returns the gain's deviation and bias in place of score_bound and value_bound.
    gain = np.where(allowed.score_bound > 0, allowed.score_bound, np.inf)
    return rounded, Allowance(allowed.out, allowed.lse, gain, allowed.value_bound)


def _attend_in_e4m3(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
    """Attend with query and weights rounded to e4m3; divide ``out`` by the rounded weights' sum."""
    scale = np.abs(query).max(axis=1, keepdims=True) / LARGEST  # [H, 1]
    scale = np.where(scale > 0, scale, 1.0)
    coarse = widen(decode(encode(query / scale))) * scale
    out, lse, score_bound, value_bound = attend_one(problem, coarse, keys, rounding)
    scores = problem.softmax_scale * (coarse @ keys.T)  # [H, K]
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    weights = widen(decode(encode(weights * _WEIGHT_SCALE)))
    values = keys[:, : problem.dims.kv_lora_rank]  # [K, R]
    out = widen(round_to(weights @ values / weights.sum(axis=1, keepdims=True), problem.dtype))
    return out, lse, score_bound, value_bound


def _allow(problem: Problem, query: Array, keys: Array, _rounding: Rounding) -> QueryAnswer:
    """Return the allowed errors of out and lse, and the gain's deviation and bias (see above)."""
    out, lse, _, value_bound = attend_one(problem, query, keys, Rounding.EXACT)
    values = keys[:, : problem.dims.kv_lora_rank]  # [K, R]
    scale = problem.softmax_scale
    weights = np.exp(scale * (query @ keys.T) - lse[:, None])  # [H, K]
    squares = weights**2
    norm = np.sqrt(squares.sum(axis=1))  # [H]
    of_scores = _DEVIATION * scale * np.sqrt((query**2 @ (keys**2).T).max(axis=1))
    of_mean = _DEVIATION * scale * np.sqrt((query**2 * (weights @ keys) ** 2).sum(axis=1))
    most = _CONFIDENCE * of_scores
    of_lse = np.minimum(most, _CONFIDENCE * of_mean + most**2 / 2)
    of_lse += _CONFIDENCE * _OF_WEIGHTS * norm

    by_weight = squares @ values**2  # [H, R]
    spread = by_weight - 2 * out * (squares @ values) + out**2 * norm[:, None] ** 2
    variance = of_scores[:, None] ** 2 * spread + _OF_WEIGHTS**2 * by_weight
    of_out = _CONFIDENCE * np.sqrt(np.maximum(variance, 0))
    of_out = np.where(most[:, None] > 1, 2 * value_bound, of_out)

    squared = (out**2).sum(axis=1, keepdims=True)  # [H, 1]
    along = out @ values.T / np.where(squared > 0, squared, 1.0)  # [H, K]: 1 + a_j
    pulls = weights * (along - 1)  # [H, K]
    variance = (scale * query * (pulls @ keys)) ** 2  # [H, R+P]
    of_gain = _DEVIATION**2 * variance.sum(axis=1)
    of_gain += _OF_WEIGHTS**2 * (squares * along**2).sum(axis=1)
    bias = 1.5 * of_scores**2 * np.abs(pulls).sum(axis=1)
    known = (most <= 1) & (squared[:, 0] > 0)
    return of_out, of_lse, np.where(known, np.sqrt(of_gain + bias**2), np.inf), bias
