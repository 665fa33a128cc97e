"""Strategies of numbers: the limits of the allowed values, and any other numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
"""The function that hypothesis passes to a composite strategy."""

LOWEST, HIGHEST = -(2**31), 2**31 - 1
LOWEST_64, HIGHEST_64 = -(2**63), 2**63 - 1


def below_zero(*sizes: int) -> st.SearchStrategy[int]:
    """Return numbers below 0: numbers near 0, numbers near a size, the lowest, and any others."""
    near = {-1, -2, *(-n for n in sizes), *(-n - 1 for n in sizes), *(1 - n for n in sizes)}
    edges = sorted((n for n in near if n < 0), reverse=True)
    return st.sampled_from([*edges, LOWEST, LOWEST + 1]) | st.integers(LOWEST, -1)


def above(limit: int) -> st.SearchStrategy[int]:
    """Return numbers above a limit: numbers near it, the highest, and any others."""
    edges = [limit + 1, limit + 2, 2 * limit + 1, 2**30, HIGHEST - 1, HIGHEST]
    return st.sampled_from(edges) | st.integers(limit + 1, HIGHEST)


def wide_below_zero() -> st.SearchStrategy[int]:
    """Return 64-bit numbers below 0."""
    return st.sampled_from([-1, -2, LOWEST, LOWEST - 1, LOWEST_64]) | st.integers(LOWEST_64, -1)


def wide_above(limit: int) -> st.SearchStrategy[int]:
    """Return 64-bit numbers from a limit on."""
    edges = [limit, limit + 1, HIGHEST, HIGHEST + 1, 2**32, 2**62, HIGHEST_64]
    return st.sampled_from(edges) | st.integers(limit, HIGHEST_64)


def in_32_bits(number: int) -> int:
    """Return the nearest number that fits into 32 bits."""
    return min(max(number, LOWEST), HIGHEST)
