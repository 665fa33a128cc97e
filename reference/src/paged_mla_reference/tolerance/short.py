"""How near the answers of short rows are, on average (S-22): the mean square of their errors.

A budget for the largest error of a step does not see that every answer is a little worse than it
has to be. An average does. In rows of 2 to 64 keys, in 16 bits, the rounding of ``out`` and of the
weights makes nearly all of the error:

* With the highest score for a peak, the largest weight is 1 and has no error. Each other weight w
  is off by up to ``w u``, where u is the unit roundoff of the type. The rounded oracle has these
  two rounding points and no other (:func:`paged_mla_reference.rules.attention.weighted_mean`), so
  the mean square of its errors, over the same queries, is what an answer costs.
* With a peak above the highest score, the largest weight is rounded too. It weighs the most, so
  the mean square grows by half and more: measured on normal numbers, 1.8 times at two keys and 1.5
  times at 64.
* The denominator may sum the weights as they were or as they were rounded. Both are as near where
  the largest weight is 1; if it is not 1, they have to be rounded alike, or one key is no longer
  that key (:mod:`paged_mla_reference.tolerance.single`).
* Weights that are divided by their sum before they are rounded, or that are cut off, cost as much
  as a peak that is too high.
* A peak that rises late, once weights would pass some threshold, leaves the largest weight above 1
  in rows whose keys lie in several tiles. In tiles of 16 keys that costs 1 to 4 percent more than
  is allowed, so such kernels need tiles that hold 64 keys, or a peak that rises at once.
* Partial answers of splits that are rounded to 16 bits before they are merged are rounded twice:
  1.3 times the error.

All elements of one query share the errors of its weights, so queries are what is counted: those of
a step that see the same number of keys, each with the mean square of its R errors. Two right
implementations may round in another order. As if their errors had nothing in common, the difference
of two means of n queries has ``sqrt(2 / n)`` times the deviation of one query; four of these are
allowed. The float32 error of scores, of sums of K products, adds ``sqrt(K) u |s|`` to the relative
error of a weight, independently, so that squares add up.
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
FEWEST_QUERIES = 96  # whose deviation says something
_DEVIATIONS = 4.0
_UNIT_ROUNDOFF = 2.0**-24  # float32


def check_short(
    problem: Problem, seen: NDArray[np.int64], actual: Output, exact: Answer, rounded: Answer
) -> list[Check]:
    """Hold the mean square error of queries that see few keys against the oracle's (S-22).

    Parameters
    ----------
    problem : Problem
    seen : int [T]
        How many keys each query sees (:func:`paged_mla_reference.rules.masks.keys_seen`).
    actual : Output
    exact, rounded : Answer
        Of every query; those that are NaN are left out.

    Returns
    -------
    list of Check
        One for each number of keys that enough queries see; root mean squares.
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
    """Hold the queries of `tokens`, which see so many keys each."""
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
            f"budget {budget:.4g}; {math.sqrt(own.mean()):.4g} where the largest weight is 1 and "
            f"weights and answers are rounded once"
        )
        raise Mismatch("S-22", "out", detail)
    return Check(f"root mean square at {keys} keys", error, budget)
