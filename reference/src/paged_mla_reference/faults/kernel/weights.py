"""Faults of 16-bit weights with unnecessary rounding errors, which only S-22 detects."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import scoring
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.problem import Problem

Array = NDArray[np.float64]
RULES = ("S-22",)


def _weighing(oracle: Oracle, weigh: Callable[[Array, str], Array]) -> Oracle:
    """Return an oracle that computes the weights of values by another function.

    `weigh` takes scores [H, K] and the problem's dtype. It returns the weights of values divided
    by the sum of weights.
    """

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        scores = widen(round_to(problem.softmax_scale * (query @ keys.T), "float32"))
        out = weigh(scores, problem.dtype) @ keys[:, : problem.dims.kv_lora_rank]
        return out, *attend_one(problem, query, keys, rounding)[1:]

    return scoring(oracle, attend)


def _rounded_below(scores: Array, peak: Array, dtype: str) -> Array:
    """Return weights relative to `peak`, rounded, divided by the sum of unrounded weights."""
    weights = np.exp(scores - peak)
    return np.asarray(widen(round_to(weights, dtype)) / weights.sum(axis=1, keepdims=True))


@kernel_fault(FaultClass.PRECISION, *RULES, through=_weighing)
def the_peak_is_raised_to_a_power_of_two(scores: Array, dtype: str) -> Array:
    """Weights are relative to the next power of two above the largest before rounding."""
    peak = np.ceil(scores.max(axis=1, keepdims=True) / np.log(2)) * np.log(2)
    return _rounded_below(scores, peak, dtype)


@kernel_fault(FaultClass.PRECISION, *RULES, through=_weighing)
def weights_are_rounded_before_the_peak_is_divided_out(scores: Array, dtype: str) -> Array:
    """Weights are relative to the highest score of all heads when they are rounded to 16 bits."""
    own = scores.max(axis=1, keepdims=True)
    # A difference above 8 would lose weights of float16, which other rules detect.
    peak = np.minimum(scores.max(), own + 8)
    return _rounded_below(scores, peak, dtype)


@kernel_fault(FaultClass.PRECISION, *RULES, through=_weighing)
def weights_are_rounded_once_divided_by_their_sum(scores: Array, dtype: str) -> Array:
    """Weights are divided by their sum in float32 before they are rounded to 16 bits."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    return widen(round_to(weights / weights.sum(axis=1, keepdims=True), dtype))


@kernel_fault(FaultClass.PRECISION, *RULES, through=_weighing)
def weights_are_cut_off(scores: Array, dtype: str) -> Array:
    """Weights are rounded to 16 bits toward zero."""
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    nearest = round_to(weights, dtype)
    below = np.nextafter(nearest, np.zeros((), nearest.dtype))
    cut = np.where(widen(nearest) > weights, widen(below), widen(nearest))
    return np.asarray(cut / weights.sum(axis=1, keepdims=True))
