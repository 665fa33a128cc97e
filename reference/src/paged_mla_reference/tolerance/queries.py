"""Comparison of quantized queries with the oracle's.

Codes and scales must be exact, except for the parts that depend on a rotation.

Rule ids: S-11, S-12.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.e4m3 import LARGEST, decode
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.rounding import widen
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.compare import Check, Mismatch, first, same_form
from paged_mla_reference.tolerance.pattern import describe
from paged_mla_reference.tolerance.rotation_tolerance import are_neighbours, scales_are_near
from paged_mla_shared.dtypes import bits
from paged_mla_shared.problem import Batch, Problem


def check_queries(
    problem: Problem,
    batch: Batch,
    actual: tuple[NDArray[np.uint8], NDArray[np.float32]],
    expected: tuple[NDArray[np.uint8], NDArray[np.float32]],
    *,
    given: float | None,
) -> list[Check]:
    """Compare the codes and scales of all tokens of rows with the oracle's (S-11).

    With a rope, values of the rotated part may have the error of a rounded rotation. If such a
    value is the largest of its line, the scale of the line may have the same relative error, unless
    the caller passed one scale for all queries.

    Parameters
    ----------
    problem : Problem
    batch : Batch
    actual, expected : tuple
        Codes, uint8 [T, H, R + P], and scales, float32 [T, H].
    given : float or None
        The scale that the caller passed; ``None`` if the scales come from the data.

    Raises
    ------
    Mismatch
    """
    (codes, scales), (right_codes, right_scales) = actual, expected
    same_form("codes", codes, right_codes.shape, "uint8")
    same_form("scales", scales, right_scales.shape, "float32")
    wrong_codes, wrong_scales, checks = wrong_queries(problem, batch, actual, expected, given=given)
    if wrong_scales.any():
        at = first(wrong_scales)
        detail = f"{scales[at]} at {at}, expected {right_scales[at]}"
        detail += f"; {describe(wrong_scales, batch)}"
        raise Mismatch("S-11", "scales of queries", detail, at)
    if wrong_codes.any():
        at, where = first(wrong_codes), np.asarray(wrong_codes.any(axis=-1))
        detail = f"{codes[at]:#04x} at {at}, expected {right_codes[at]:#04x}"
        raise Mismatch("S-11", "codes of queries", f"{detail}; {describe(where, batch)}", at)
    return checks


def wrong_queries(
    problem: Problem,
    batch: Batch,
    actual: tuple[NDArray[np.uint8], NDArray[np.float32]],
    expected: tuple[NDArray[np.uint8], NDArray[np.float32]],
    *,
    given: float | None,
) -> tuple[NDArray[np.bool_], NDArray[np.bool_], list[Check]]:
    """Return which codes [T, H, R + P] and scales [T, H] are wrong, and the comparisons made.

    The arguments are those of :func:`check_queries`.
    """
    live = keys_of_tokens(batch) > 0  # [T]
    (codes, scales), (right_codes, right_scales) = actual, expected
    wrong_scales = (bits(scales) != bits(right_scales)) & live[:, None]
    wrong_codes = (codes != right_codes) & live[:, None, None]
    checks = [Check("codes and scales", 0.0, 0.0)]
    if problem.rope is not None and live.any():
        rotated = np.s_[live, :, problem.dims.kv_lora_rank :]
        values = widen(decode(right_codes[rotated]))
        error = np.abs(widen(decode(codes[rotated])) - values)
        finite = np.isfinite(error)
        values, error = np.where(finite, (values, error), 0.0)
        budget = budgets.rotation_budget(values, "float8_e4m3")
        keeps_scale = np.ones_like(wrong_scales)
        if given is None:
            turned = wrong_scales & _scales_are_turned(problem, scales, right_codes, right_scales)
            wrong_scales &= ~turned
            wrong_codes &= ~(turned[..., None] & are_neighbours(codes, right_codes))
            keeps_scale = ~turned
        asked = np.broadcast_to(keeps_scale[live][..., None], error.shape)
        if int((error[asked] > 0).sum()) <= budgets.most_turned(int(asked.sum())):
            wrong_codes[rotated] &= ~(asked & finite & (error <= budget))
        worst = np.unravel_index(np.argmax(error / budget), error.shape)
        checks.append(Check("rotated q_pe", float(error[worst]), float(budget[worst])))
    return wrong_codes, wrong_scales, checks


def _scales_are_turned(
    problem: Problem,
    scales: NDArray[np.float32],
    right_codes: NDArray[np.uint8],
    right_scales: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """Return which scales [T, H] are explained by another rounding of a rotated number (S-12)."""
    sizes, rank = np.abs(widen(decode(right_codes))), problem.dims.kv_lora_rank
    is_largest = sizes[..., rank:].max(axis=-1) == LARGEST  # a rotated number is the line's largest
    return np.asarray(is_largest & scales_are_near(scales, right_scales, problem.dtype))
