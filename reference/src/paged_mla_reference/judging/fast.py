"""What products of 8 bits may cost: the budget class of backends that declare them.

A backend with ``products="fast"`` may round queries, and the weights that meet the values, to e4m3
before it multiplies them with cached e4m3 codes; sums stay in float32. It scales each query, head
by head, so that no element passes 448 and none that matters is subnormal, and weights so that the
largest of them is 2^7 or more. It may divide by the sum of weights as they were or as rounded.

e4m3 rounds x by at most 2^-4 |x|, evenly spread: with a standard deviation of at most
``u |x|``, u = 2^-4 / sqrt(3). Elements round independently, so that to first order

* the score of key j is off by ``d_j``, whose deviation is ``u scale |q * k_j|`` (the norm of the
  elementwise product), ``z`` at most;
* lse is off by ``sum p_j d_j``, deviation ``u scale |q * mean key|``, and by no more than the
  largest ``|d_j|`` in any case; what the first order leaves out is at most ``max|d|^2 / 2``
  (Hoeffding's lemma). Rounded weights add ``u |p|`` where lse is taken from their sum;
* out is off by ``sum p_j d_j (v_j - out)`` and, for the weights, by ``sum p_j e_j v_j``:
  deviations ``z |p (v - out)|`` and ``u |p v|``, norms over keys. Errors of scores that the keys
  share do not average out; twice the distance of an oracle that rounds in the same places, which
  the budget takes anyway, has them.

Four deviations are allowed, as for sums in float32. Where four deviations of a score pass 1, an
answer may be that of another key: then out may be off by twice the largest value.

Rule ids: S-5, S-7.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import Answer, QueryAnswer, attend_one, attend_visible
from paged_mla_reference.e4m3 import LARGEST, decode, encode
from paged_mla_reference.masks import visibility
from paged_mla_reference.rounding import Rounding, round_to, widen
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Problem

Array = NDArray[np.float64]

_DEVIATION = 2.0**-4 / math.sqrt(3)
_CONFIDENCE = 4.0
_WEIGHT_SCALE = 2.0**8


def may_be_fast(problem: Problem, products: str) -> bool:
    """Return whether a backend that declares `products` may round what meets this cache."""
    return products == "fast" and FORMATS[problem.cache_format].ckv_dtype == "float8_e4m3"


def fast_answers(
    problem: Problem, batch: Batch, image: CacheImage, asked: NDArray[np.bool_] | None = None
) -> tuple[Answer, Answer]:
    """Return an answer rounded as a backend with products of 8 bits does, and its allowance.

    The allowance is an answer in form: ``out`` and ``lse`` are the four deviations of each element
    and query, 0 where nothing is visible.
    """
    visible = visibility(problem, batch)
    rounded, allowance = (
        attend_visible(
            problem, batch, image, visible, Rounding.SPEC, asked=asked, attend_query=attend_query
        )
        for attend_query in (_attend_in_e4m3, _allow)
    )
    allowance.lse[np.isneginf(allowance.lse)] = 0
    return rounded, allowance


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


def _allow(problem: Problem, query: Array, keys: Array, _: Rounding) -> QueryAnswer:
    """Return four deviations of what a query gets, as the module derives them."""
    out, lse, score_bound, value_bound = attend_one(problem, query, keys, Rounding.EXACT)
    values = keys[:, : problem.dims.kv_lora_rank]  # [K, R]
    scale = problem.softmax_scale
    weights = np.exp(scale * (query @ keys.T) - lse[:, None])  # [H, K]
    squares = weights**2
    norm = np.sqrt(squares.sum(axis=1))  # [H]
    of_scores = _DEVIATION * scale * np.sqrt((query**2 @ (keys**2).T).max(axis=1))
    of_mean = _DEVIATION * scale * np.sqrt((query**2 * (weights @ keys) ** 2).sum(axis=1))
    most = _CONFIDENCE * of_scores
    of_lse = np.minimum(most, _CONFIDENCE * of_mean + most**2 / 2)
    of_lse += _CONFIDENCE * _DEVIATION * norm

    by_weight = squares @ values**2  # [H, R]
    spread = by_weight - 2 * out * (squares @ values) + out**2 * norm[:, None] ** 2
    variance = of_scores[:, None] ** 2 * spread + _DEVIATION**2 * by_weight
    of_out = _CONFIDENCE * np.sqrt(np.maximum(variance, 0))
    of_out = np.where(most[:, None] > 1, 2 * value_bound, of_out)
    return of_out, of_lse, score_bound, value_bound
