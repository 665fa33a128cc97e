"""The catalog of faults: known bugs, each described by data and one small change.

``CATALOGUE`` contains every fault by its name. A fault of a kernel, run as a backend, shows that
the suite detects it; an explanation uses it to predict the contents of a dump. A fault of a runner
wraps a right runner. A fault of an engine makes the simulated engine wrong.
:class:`~paged_mla_reference.faults.fault.Kind` documents the arguments of each kind of change.
"""

from __future__ import annotations

from paged_mla_reference.faults.engine import leaks, schedules
from paged_mla_reference.faults.fault import Fault, FaultClass, Kind, Shows, faults_of
from paged_mla_reference.faults.kernel import (
    addressing,
    codes,
    denominators,
    eight_bits,
    emptiness,
    empty_splits,
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
from paged_mla_reference.faults.runner import captured, contract, illegal_steps, known, stale

CATALOGUE: dict[str, Fault] = faults_of(
    (
        # kernels
        addressing,
        tables,
        visibility,
        tiles,
        scores,
        softmax,
        denominators,
        weights,
        rotation,
        frequencies,
        masks,
        emptiness,
        writes,
        gathering,
        merging,
        splits,
        empty_splits,
        packing,
        sizes,
        formats,
        codes,
        eight_bits,
        queries,
        prefill,
        layer,
        # runners
        captured,
        stale,
        known,
        contract,
        illegal_steps,
        # engines
        schedules,
        leaks,
    )
)

IN_16_BITS = frozenset(name for name, fault in CATALOGUE.items() if "S-22" in fault.rules)
"""Names of the faults that show only in 16-bit element types, where weights are rounded."""


def of_kind(kind: Kind) -> dict[str, Fault]:
    """Return the faults of one kind, by name."""
    return {name: fault for name, fault in CATALOGUE.items() if fault.kind is kind}


__all__ = ["CATALOGUE", "IN_16_BITS", "Fault", "FaultClass", "Kind", "Shows", "of_kind"]
