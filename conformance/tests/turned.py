"""Rotated elements that are rounded to their other neighbor."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_shared.problem import Rope


def turned(
    x: NDArray[Any], positions: NDArray[np.int64], rope: Rope, dtype: str, ulps: int = 1
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return rotated elements rounded to nearest, and `ulps` units away on the other side."""
    exact = rotate(widen(x), positions, rope)
    nearest = round_to(exact, dtype)
    towards = np.where(widen(nearest) < exact, np.inf, -np.inf).astype(nearest.dtype)
    other = nearest
    for _ in range(ulps):
        other = np.nextafter(other, towards)
    return nearest, other
