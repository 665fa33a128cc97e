"""Hypotheses about the cause of a wrong step: known faults of the catalog, and single faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from paged_mla_reference.explain.checks.finding import Stage
from paged_mla_reference.faults import Kind, of_kind
from paged_mla_reference.oracle import RIGHT, Oracle

_FUNCTIONS = {
    Stage.METADATA: ("metadata",),
    Stage.APPEND: ("append",),
    Stage.GATHER: ("gather_context",),
    Stage.QUERIES: ("quantize_queries",),
    Stage.MERGE: ("merge",),
    Stage.ATTENTION: ("attend",),
    Stage.LAYER: ("layer",),
    Stage.PREFILL: ("prefill",),
}


@dataclass(frozen=True)
class Hypothesis:
    """A fault that may have caused the errors of a step.

    Parameters
    ----------
    name : str
    what : str
        The effect of the fault, in a sentence.
    change : callable
        Returns an oracle that has the fault, from a right oracle.
    rules : tuple of str
        The ids of the rules that the fault breaks.
    citations, akin : tuple of str
        Reports of this fault, and of similar faults; empty for a single fault.
    known : bool
        Whether the fault is in the catalog.
    """

    name: str
    what: str
    change: Callable[[Oracle], Oracle]
    rules: tuple[str, ...] = ()
    citations: tuple[str, ...] = ()
    akin: tuple[str, ...] = ()
    known: bool = False


def catalogued(stage: Stage) -> Iterator[Hypothesis]:
    """Return every fault of the catalog that changes what a stage computes."""
    for fault in of_kind(Kind.KERNEL).values():
        wrong = vars(fault.change(RIGHT))
        if any(wrong[name] is not vars(RIGHT)[name] for name in _FUNCTIONS[stage]):
            yield Hypothesis(
                fault.name,
                fault.what,
                fault.change,
                fault.rules,
                fault.citations,
                fault.akin,
                known=True,
            )
