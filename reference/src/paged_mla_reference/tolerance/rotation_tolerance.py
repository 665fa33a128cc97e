"""Allowed scales and codes if a line's largest number was rounded to its other neighbor (S-12)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.e4m3 import LARGEST, decode
from paged_mla_reference.rules.rounding import ulp, widen
from paged_mla_reference.tolerance import budgets


def scales_are_near(
    scales: NDArray[np.float32], right: NDArray[np.float32], dtype: str
) -> NDArray[np.bool_]:
    """Return which `scales` [...] are within the rotation budget of the scales in `right` [...].

    `dtype` is the type to which rotated numbers are rounded.
    """
    size = widen(right)
    budget = budgets.rotation_budget(LARGEST * size[..., None], dtype)[..., 0] / LARGEST
    return np.asarray(np.abs(widen(scales) - size) <= budget + ulp(size, "float32"))


def are_neighbours(codes: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which `codes` are within one ulp of the codes in `right`.

    A slightly different scale gives such codes for the same number.
    """
    mine, theirs = widen(decode(codes)), widen(decode(right))
    return np.asarray(np.abs(mine - theirs) <= ulp(np.abs(theirs), "float8_e4m3"))
