"""Check of the mean square error of short rows (S-22).

A budget for the largest error of a step does not show that every output is slightly less accurate
than it could be; an average does. In rows of 2 to 64 keys, in 16 bits, the rounding of ``out`` and
of the weights causes nearly all of the error:

* If the peak is the highest score, the largest weight is 1 and has no error. The error of each
  other weight w is up to ``w u``, where u is the unit roundoff of the type. The rounded oracle has
  only these two rounding points in 16 bits
  (:func:`paged_mla_reference.rules.attention.weighted_mean`), so the mean square of its errors,
  over the same queries, is the expected mean square.
* If the peak is above the highest score, the largest weight is rounded too. It has the largest
  effect, so the mean square grows by half or more: on normal numbers, it was measured to be 1.8
  times as large at two keys and 1.5 times as large at 64 keys.
* The denominator may sum the weights before or after their rounding. Both are equally accurate if
  the largest weight is 1. If it is not 1, both sums must use the same rounded weights, or the
  output of a query that sees one key differs from that key
  (:mod:`paged_mla_reference.tolerance.single`).
* Weights that are divided by their sum before they are rounded, or that are truncated, cause as
  much error as a peak that is too high.
* If a kernel raises the peak only when weights would pass a threshold, the largest weight can be
  above 1 in rows whose keys are in several tiles. With tiles of 16 keys, the error is then 1 to 4
  percent above the budget. Such kernels need tiles that hold 64 keys, or must raise the peak
  immediately.
* If the partial results of splits are rounded to 16 bits before they are merged, they are rounded
  twice. The error is then 1.3 times as large.

All elements of one query share the errors of its weights, so the check averages over queries. It
uses the queries of a step that see the same number of keys, each with the mean square of its R
errors. Two correct implementations may round in another order. If their errors are independent, the
difference of two means over n queries has ``sqrt(2 / n)`` times the deviation of one query; the
check allows four of these deviations. The float32 error of scores, which are sums of K products,
adds ``sqrt(K) u |s|`` to the relative error of a weight. It is independent, so the squares add up.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.tolerance.compare import Check, Mismatch
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Output, Problem

LENGTHS = range(2, 65)
FEWEST_QUERIES = 96  # fewer queries give no useful deviation
_DEVIATIONS = 4.0
_UNIT_ROUNDOFF = 2.0**-24  # float32


def check_short(
    problem: Problem, seen: NDArray[np.int64], actual: Output, exact: Answer, rounded: Answer
) -> list[Check]:
    """Compare the mean square error of queries that see few keys with the oracle's (S-22).

    Parameters
    ----------
    problem : Problem
    seen : int [T]
        How many keys each query sees (:func:`paged_mla_reference.rules.masks.keys_seen`).
    actual : Output
    exact, rounded : Answer
        The oracle's outputs of every query; queries with NaN are skipped.

    Returns
    -------
    list of Check
        Root mean squares, one for each number of keys that enough queries see. The list is empty
        in float32, and for cache formats with ``has_own_scales``.

    Raises
    ------
    Mismatch
    """
    if problem.dtype == "float32" or FORMATS[problem.cache_format].has_own_scales:
        return []
    is_known = np.isfinite(exact.out).all(axis=(1, 2))
    checks = []
    for keys in LENGTHS:
        tokens = np.flatnonzero((seen == keys) & is_known)
        if len(tokens) * problem.dims.num_heads >= FEWEST_QUERIES:
            checks.append(_check_length(problem, keys, tokens, (actual, exact, rounded)))
    return checks


def _check_length(
    problem: Problem,
    keys: int,
    tokens: NDArray[np.int64],
    answers: tuple[Output, Answer, Answer],
) -> Check:
    """Check the queries of `tokens`, each of which sees `keys` keys."""
    actual, exact, rounded = (widen(answer.out[tokens]) for answer in answers)
    own = np.square(rounded - exact).mean(axis=2)  # [n, H]
    found = np.square(actual - exact).mean(axis=2)
    chance = _DEVIATIONS * math.sqrt(2 / own.size) * own.std(ddof=1)
    width = problem.dims.kv_lora_rank + problem.dims.qk_rope_head_dim
    relative = math.sqrt(width) * _UNIT_ROUNDOFF * answers[1].score_bound[tokens]  # [n, H]
    of_scores = np.square(relative) * np.square(exact).mean(axis=2)
    error, budget = math.sqrt(found.mean()), math.sqrt(own.mean() + chance + of_scores.mean())
    if not error <= budget:
        detail = (
            f"root mean square error {error:.4g} of {found.size} queries that see {keys} keys, "
            f"budget {budget:.4g}; {math.sqrt(own.mean()):.4g} if the largest weight is 1 and "
            f"weights and outputs are rounded once"
        )
        raise Mismatch("S-22", "out", detail)
    return Check(f"root mean square at {keys} keys", error, budget)
