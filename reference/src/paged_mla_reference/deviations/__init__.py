"""Known ways of being wrong, each as data and a small change of the oracle or of an engine.

``ORACLE``: the change takes an :class:`~paged_mla_reference.oracle.Oracle` and returns a wrong
one. It shows what an answer would be if the deviation were the cause, and as a backend it shows
that a suite can fail.

``ENGINE``: the change is a context manager; while it is open, the simulated engine is wrong.
"""

from __future__ import annotations

from paged_mla_reference.deviations import (
    addressing,
    codes,
    eight_bits,
    emptiness,
    engine,
    formats,
    frequencies,
    gathering,
    layer,
    masks,
    merging,
    packing,
    prefill,
    queries,
    rotation,
    scores,
    sizes,
    softmax,
    splits,
    tables,
    tiles,
    visibility,
    weights,
    writes,
)
from paged_mla_reference.deviations.deviation import Deviation, Fault, deviations_of

ORACLE: dict[str, Deviation] = deviations_of(
    (
        addressing,
        tables,
        visibility,
        tiles,
        scores,
        softmax,
        weights,
        rotation,
        frequencies,
        masks,
        emptiness,
        writes,
        gathering,
        merging,
        splits,
        packing,
        sizes,
        formats,
        codes,
        eight_bits,
        queries,
        prefill,
        layer,
    )
)
ENGINE: dict[str, Deviation] = deviations_of((engine,))

IN_16_BITS = frozenset(name for name, deviation in ORACLE.items() if "S-22" in deviation.rules)
"""Deviations that show in element types of 16 bits alone: weights are rounded there."""

__all__ = ["ENGINE", "IN_16_BITS", "ORACLE", "Deviation", "Fault"]
