"""What scales and codes become where a largest number was rotated to its other neighbour (S-12)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.e4m3 import LARGEST, decode
from paged_mla_reference.rules.rounding import ulp, widen
from paged_mla_reference.tolerance import budgets


def scales_are_near(
    scales: NDArray[np.float32], right: NDArray[np.float32], dtype: str
) -> NDArray[np.bool_]:
    """Return which scales [...] a largest number of `dtype` has that is off by a rotation."""
    size = widen(right)
    budget = budgets.rotation_budget(LARGEST * size[..., None], dtype)[..., 0] / LARGEST
    return np.asarray(np.abs(widen(scales) - size) <= budget + ulp(size, "float32"))


def are_neighbours(codes: NDArray[np.uint8], right: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """Return which codes are those of a number that is divided by a slightly other scale."""
    mine, theirs = widen(decode(codes)), widen(decode(right))
    return np.asarray(np.abs(mine - theirs) <= ulp(np.abs(theirs), "float8_e4m3"))
