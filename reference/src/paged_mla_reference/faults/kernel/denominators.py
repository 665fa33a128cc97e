"""Faults of the sum of softmax weights: it is rounded to 16 bits after each tile of keys."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import scoring
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.problem import Problem

Array = NDArray[np.float64]
SCORED = ("S-5", "S-7")
TILE = 64  # keys


def lse_of_rounded_sums(scores: Array, dtype: str, tile: int) -> Array:
    """Return the lse [H] of scores [H, K] whose sum is rounded after each tile of keys.

    The sum is relative to the highest score so far. If a tile has a higher score, the earlier sum
    is scaled before the tile is added.
    """
    highest = np.full((len(scores), 1), -np.inf)
    total = np.zeros((len(scores), 1))
    for start in range(0, scores.shape[1], tile):
        own = scores[:, start : start + tile]
        risen = np.maximum(highest, own.max(axis=1, keepdims=True))
        added = np.exp(own - risen).sum(axis=1, keepdims=True)
        total = widen(round_to(total * np.exp(highest - risen) + added, dtype))
        highest = risen
    return np.asarray((highest + np.log(total))[:, 0])


def summing_in(oracle: Oracle, dtype: str, tile: int) -> Oracle:
    """Return an oracle whose sum of weights is rounded to `dtype` after each tile of keys."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        out, right, bound, largest = attend_one(problem, query, keys, rounding)
        scores = widen(round_to(problem.softmax_scale * (query @ keys.T), "float32"))
        lse = lse_of_rounded_sums(scores, dtype, tile)
        return out * np.exp(right - lse)[:, None], lse, bound, largest

    return scoring(oracle, attend)


@kernel_fault(FaultClass.PRECISION, *SCORED)
def the_sum_of_weights_is_in_bfloat16(oracle: Oracle) -> Oracle:
    """The sum of softmax weights is rounded to bfloat16 after every 64 keys."""
    return summing_in(oracle, "bfloat16", TILE)


@kernel_fault(FaultClass.PRECISION, *SCORED)
def the_sum_of_weights_is_in_float16(oracle: Oracle) -> Oracle:
    """The sum of softmax weights is rounded to float16 after every 64 keys."""
    return summing_in(oracle, "float16", TILE)
