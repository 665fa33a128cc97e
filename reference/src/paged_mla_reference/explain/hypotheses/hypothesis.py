"""Ways in which a step may have gone wrong: those of the catalogue, and single faults."""

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
    """One way of being wrong.

    Parameters
    ----------
    name : str
    what : str
        What it does, in a sentence.
    change : callable
        Makes a right oracle wrong.
    rules : tuple of str
        Rules it breaks.
    citations, akin : tuple of str
        Reports of it, and of something close to it; none of a single fault.
    known : bool
        Whether it is in the catalogue.
    """

    name: str
    what: str
    change: Callable[[Oracle], Oracle]
    rules: tuple[str, ...] = ()
    citations: tuple[str, ...] = ()
    akin: tuple[str, ...] = ()
    known: bool = False


def catalogued(stage: Stage) -> Iterator[Hypothesis]:
    """Return every fault of the catalogue that changes what a stage computes."""
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
