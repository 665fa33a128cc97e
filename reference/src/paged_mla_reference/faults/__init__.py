"""Known ways of being wrong, each as data and a small change of the oracle or of an engine.

``ORACLE``: the change takes an :class:`~paged_mla_reference.oracle.Oracle` and returns a wrong
one. It shows what an answer would be if the fault were the cause, and as a backend it shows
that a suite can fail.

``ENGINE``: the change is a context manager; while it is open, the simulated engine is wrong.
"""

from __future__ import annotations

from paged_mla_reference.faults.engine import schedules
from paged_mla_reference.faults.fault import Fault, FaultClass, faults_of
from paged_mla_reference.faults.kernel import (
    addressing,
    codes,
    eight_bits,
    emptiness,
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

ORACLE: dict[str, Fault] = faults_of(
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
ENGINE: dict[str, Fault] = faults_of((schedules,))

IN_16_BITS = frozenset(name for name, fault in ORACLE.items() if "S-22" in fault.rules)
"""Faults that show in element types of 16 bits alone: weights are rounded there."""

__all__ = ["ENGINE", "IN_16_BITS", "ORACLE", "Fault", "FaultClass"]
