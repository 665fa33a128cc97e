"""What a fault is: a known way of being wrong, as data and one small change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from types import ModuleType
from typing import Any


class FaultClass(StrEnum):
    """The class a fault belongs to."""

    OFFSET = "32-bit offset"
    STRIDE = "stride assumption"
    PAGE = "page order and size"
    HOST_SCALAR = "stale host scalar"
    STALE = "stale rows and buffers"
    PAD_VALUE = "pad value"
    LENGTH = "length off by one"
    CAUSAL = "causal alignment"
    LSE = "lse base and scale"
    EMPTY = "empty row"
    LEAK = "NaN and 0 x NaN leak"
    SCALE = "scale omitted, doubled or misapplied"
    RANGE = "score range"
    ROPE = "rope pairing and position"
    MASK = "mask base and layout"
    SIBLING = "sibling leak"
    SPLIT = "split and merge mismatch"
    WRITE = "cache write"
    TABLE_TAIL = "table tail read"
    MIXED = "extend and decode rows swapped or dropped"
    CONTINUATION = "continuation chunk taken for decode"
    TRUNCATED = "truncated keys"
    POSITION = "position counted twice"
    HASH = "hash chain and block pool"
    WINDOW = "draft window"
    RANKS = "context-parallel ownership"
    PARTIAL = "poisoned partial"
    LAYOUT = "[H, T] for [T, H]"
    PRECISION = "low precision"
    BATCH_MATE = "batch-mate dependence"
    VALIDATION = "bad input accepted"


@dataclass(frozen=True)
class Fault:
    """One way of being wrong.

    Parameters
    ----------
    name : str
        In the field's words, as a person types it.
    fault_class : FaultClass
    rules : tuple of str
        Ids of the rules it breaks, and of those by which it shows.
    citations : tuple of str
        Reports of it, ``project#number`` or ``project@commit``; empty when none is known.
    akin : tuple of str
        Reports of something close to it.
    what : str
        What it does.
    change : callable
        Makes the right thing wrong; what it takes is said where its kind is listed.
    """

    name: str
    fault_class: FaultClass
    rules: tuple[str, ...]
    citations: tuple[str, ...]
    akin: tuple[str, ...]
    what: str
    change: Callable[..., Any]


def breaks(
    fault_class: FaultClass, *rules: str, cites: str = "", akin: str = ""
) -> Callable[[Callable[..., Any]], Fault]:
    """Make a function or class the change of a fault, named and described as it is.

    Parameters
    ----------
    fault_class : FaultClass
    *rules : str
    cites, akin : str
        Citations, separated by spaces: of it, and of something close to it.
    """

    def make(change: Callable[..., Any]) -> Fault:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", change.__name__)
        what = " ".join((change.__doc__ or "").split())
        name = words.replace("_", "-").lower()
        return Fault(
            name, fault_class, rules, tuple(cites.split()), tuple(akin.split()), what, change
        )

    return make


def faults_of(modules: Iterable[ModuleType]) -> dict[str, Fault]:
    """Return every fault defined in `modules`, by name.

    Raises
    ------
    ValueError
        Two have one name.
    """
    found: dict[str, Fault] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, Fault):
                if value.name in found:
                    raise ValueError(f"two faults are called {value.name}")
                found[value.name] = value
    return found
