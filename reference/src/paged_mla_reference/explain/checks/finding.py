"""The result of one check of a dump."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.rules import RULES
from paged_mla_reference.tolerance.compare import Check, Mismatch


class Stage(StrEnum):
    """The stages of a step in the order of their checks: an early error makes later values wrong.

    LAYER is the attention of a whole layer, between its projections. PREFILL is attention over
    keys and values of every head.
    """

    METADATA = "metadata"  # lengths, tables, masks, slots, positions
    APPEND = "append"  # bytes of the cache
    GATHER = "gather"  # gathered context
    QUERIES = "queries"  # codes and scales of 8-bit queries
    MERGE = "merge"  # the merge of partial results
    ATTENTION = "attention"  # out and lse
    LAYER = "layer"  # out and lse
    PREFILL = "prefill"  # out and lse


class State(StrEnum):
    """The outcome of a check; UNDECIDED if it cannot run, because of missing fields or a limit."""

    HELD = "held"
    BROKEN = "broken"
    UNDECIDED = "undecided"


@dataclass(frozen=True)
class Finding:
    """One check of a dump.

    Parameters
    ----------
    stage : Stage
    what : str
        The field or the quantity that was checked.
    state : State
    rule : str
        The id of the broken rule; "" if no rule is broken.
    detail : str
        How and where the rule is broken, how closely the values match, or why the check is
        undecided.
    at : tuple of int
        The first wrong coordinate; empty if it is unknown.
    error, budget : float
        Of a check that holds: the error that is largest relative to its budget, and this budget.
    """

    stage: Stage
    what: str
    state: State
    rule: str = ""
    detail: str = ""
    at: tuple[int, ...] = ()
    error: float = 0.0
    budget: float = 0.0

    @classmethod
    def broken(cls, stage: Stage, what: str, mismatch: Mismatch) -> Finding:
        """Return the finding of a mismatch."""
        detail = str(mismatch).partition(": ")[2]
        return cls(stage, what, State.BROKEN, mismatch.rule, detail, mismatch.at)

    @classmethod
    def held(cls, stage: Stage, what: str, checks: list[Check]) -> Finding:
        """Return the finding of checks that hold, with the error that is nearest to its budget."""
        worst = max(checks, key=lambda c: c.error / c.budget if c.budget else 0.0)
        detail = "every bit is right" if worst.budget == 0 else ""
        error, budget = worst.error, worst.budget
        return cls(stage, what, State.HELD, detail=detail, error=error, budget=budget)

    @classmethod
    def undecided(cls, stage: Stage, what: str, detail: str) -> Finding:
        """Return the finding of a check that the dump does not allow; `detail` is the reason."""
        return cls(stage, what, State.UNDECIDED, detail=detail)

    @property
    def sentence(self) -> str:
        """The text of the broken rule; "" if no rule is broken."""
        return RULES.get(self.rule, "")
