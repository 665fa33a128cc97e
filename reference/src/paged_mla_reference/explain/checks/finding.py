"""What a check of a dump found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_mla_reference.rules import RULES
from paged_mla_reference.tolerance.compare import Check, Mismatch


class Stage(StrEnum):
    """What is checked, in this order: what is wrong early spoils what follows."""

    METADATA = "metadata"  # lengths, tables, masks, slots, positions
    APPEND = "append"  # bytes of the cache
    GATHER = "gather"  # what was read back
    QUERIES = "queries"  # codes and scales of 8 bits
    MERGE = "merge"  # parts joined
    ATTENTION = "attention"  # out and lse
    LAYER = "layer"  # out and lse between a layer's projections
    PREFILL = "prefill"  # out and lse over keys of every head


class State(StrEnum):
    """What became of a check."""

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
        The field or the quantity.
    state : State
    rule : str
        The rule that is broken; "" unless it is.
    detail : str
        How it is broken and where, what held, or what is missing to decide.
    at : tuple of int
        First wrong coordinate, where known.
    error, budget : float
        The worst error, relative to its budget, of what held.
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
        """Return what a mismatch says."""
        detail = str(mismatch).partition(": ")[2]
        return cls(stage, what, State.BROKEN, mismatch.rule, detail, mismatch.at)

    @classmethod
    def held(cls, stage: Stage, what: str, checks: list[Check]) -> Finding:
        """Return the tightest of some checks."""
        worst = max(checks, key=lambda c: c.error / c.budget if c.budget else 0.0)
        detail = "every bit" if worst.budget == 0 else ""
        error, budget = worst.error, worst.budget
        return cls(stage, what, State.HELD, detail=detail, error=error, budget=budget)

    @classmethod
    def undecided(cls, stage: Stage, what: str, detail: str) -> Finding:
        """Return that something is missing."""
        return cls(stage, what, State.UNDECIDED, detail=detail)

    @property
    def sentence(self) -> str:
        """The broken rule's text."""
        return RULES.get(self.rule, "")
