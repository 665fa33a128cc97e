"""What products of 8 bits may cost: the budget class of backends that declare them.

A backend with ``products="fast"`` may round queries, and the weights that meet the values, to e4m3
before it multiplies them with cached e4m3 codes; sums stay in float32. It scales each query, head
by head, so that no element passes 448 and none that matters is subnormal, and weights so that the
largest of them is 2^7 or more. It may divide by the sum of weights as they were or as rounded.
Answers over parts of a row's keys may be rounded to the type of the output before they are joined:
that is allowed nothing of its own, since it is small beside the roundings to e4m3.

e4m3 rounds x by at most 2^-4 |x|. The elements of a query are of all sizes, so that their errors
are evenly spread: with a standard deviation of at most ``u |x|``, u = 2^-4 / sqrt(3). The weights
of a row may be alike, and all lie midway between two numbers: their errors have a deviation of at
most ``w |x|``, w = 2^-4, as any error of that size. Elements are taken to round independently. That
does not hold where equal weights lie midway: the signs of their errors follow the scores, and so
the keys, which shows where a latent has few columns. To first order

* the score of key j is off by ``d_j``, whose deviation is ``u scale |q * k_j|`` (the norm of the
  elementwise product), ``z`` at most;
* lse is off by ``sum p_j d_j``, deviation ``u scale |q * mean key|``, and by no more than the
  largest ``|d_j|`` in any case; what the first order leaves out is at most ``max|d|^2 / 2``
  (Hoeffding's lemma). Rounded weights add ``w |p|`` where lse is taken from their sum;
* out is off by ``sum p_j d_j (v_j - out)`` and, for the weights, by ``sum p_j e_j v_j``:
  deviations ``z |p (v - out)|`` and ``w |p v|``, norms over keys. Errors of scores that the keys
  share do not average out; twice the distance of an oracle that rounds in the same places, which
  the budget takes anyway, has them.

Four deviations are allowed, as for sums in float32. Where four deviations of a score pass 1, an
answer may be that of another key: then out may be off by twice the largest value.

Each element may be off by as much, but not all of them the same way. The **gain** of an answer is
by what part of the exact one it is longer along it, ``(out - exact) * exact / |exact|^2`` (``*``
the inner product). With ``a_j = (v_j - exact) * exact / |exact|^2``, rounding makes of it

* for scores, whose errors all come from those of one query, ``sum p_j d_j a_j`` to first order, of
  deviation ``u scale |q sum p_j a_j k_j|`` (the product by elements);
* to second order ``sum p_j a_j d_j^2 / 2 - sum p_j d_j sum p_j a_j d_j``, whose mean and deviation
  are at most ``b = 3/2 z^2 sum p_j |a_j|``, z the largest deviation of a score;
* for weights ``sum p_j e_j (1 + a_j)`` where the sum is of weights as they were, of deviation
  ``w |p (1 + a)|``, and less where it is of rounded ones.

The mean of a step's gains, each counted by the inverse of its variance, may be four of its
deviations, the mean of b, twice that of the oracle that rounds, and an ulp of 1 for the output's
own rounding. Queries whose score may be off by 1 do not count.

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

_DEVIATION = 2.0**-4 / math.sqrt(3)  # of elements of queries
_OF_WEIGHTS = 2.0**-4
_CONFIDENCE = 4.0
_WEIGHT_SCALE = 2.0**8


@dataclass(frozen=True)
class Allowance:
    """What rounding to 8 bits adds to the budgets of a step, 0 where nothing is visible.

    Parameters
    ----------
    out : float64 [T, H, R]
    lse : float64 [T, H]
    gain, bias : float64 [T, H]
        Deviation of the gain, and how far its mean may be from 0. Infinite where nothing is
        visible, or an answer may be that of another key.
    """

    out: Array
    lse: Array
    gain: Array
    bias: Array

    def of_tokens(self, tokens: NDArray[np.int64]) -> Allowance:
        """Return what `tokens` are allowed."""
        return Allowance(self.out[tokens], self.lse[tokens], self.gain[tokens], self.bias[tokens])


def gain_of(out: Array, exact: Array) -> Array:
    """Return by what part of `exact` [.., R] `out` is longer along it, [..]; 0 where that is 0."""
    squared = (exact**2).sum(axis=-1)
    along = ((out - exact) * exact).sum(axis=-1)
    return np.asarray(np.divide(along, squared, out=np.zeros_like(squared), where=squared > 0))


def may_be_fast(problem: Problem, products: str) -> bool:
    """Return whether a backend that declares `products` may round what meets this cache."""
    return products == "fast" and FORMATS[problem.cache_format].ckv_dtype == "float8_e4m3"


def fast_answers(
    problem: Problem, batch: Batch, image: CacheImage, asked: NDArray[np.bool_] | None = None
) -> tuple[Answer, Allowance]:
    """Return an answer rounded as a backend with products of 8 bits does, and its allowance."""
    visible = visibility(problem, batch)
    rounded, allowed = (
        attend_visible(
            problem, batch, image, visible, Rounding.SPEC, asked=asked, attend_query=attend_query
        )
        for attend_query in (_attend_in_e4m3, _allow)
    )
    allowed.lse[np.isneginf(allowed.lse)] = 0
    # What `_allow` says of the gain stands where an answer has the bounds of its numbers.
    gain = np.where(allowed.score_bound > 0, allowed.score_bound, np.inf)
    return rounded, Allowance(allowed.out, allowed.lse, gain, allowed.value_bound)


def _attend_in_e4m3(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
    """Attend with query and weights rounded to e4m3; out is over the sum of rounded weights."""
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
    """Return what out and lse are allowed, and the gain's deviation and bias: see the module."""
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
