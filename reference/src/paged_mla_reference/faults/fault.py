"""The type of a fault: a known bug, described by data and one small change."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from types import ModuleType
from typing import Any


class Kind(StrEnum):
    """The object that a fault changes."""

    KERNEL = "kernel"
    """The change takes an :class:`~paged_mla_reference.oracle.Oracle` and returns a wrong one."""
    RUNNER = "runner"
    """The change takes a problem and a right runner, and returns a wrong runner."""
    ENGINE = "engine"
    """The change is a context manager; while it is open, the simulated engine is wrong."""


class Shows(StrEnum):
    """The place where a fault can be observed."""

    ANSWERS = "answers"
    """In the results and writes of legal steps and schedules, or in accepting bad input."""
    ILLEGAL_STEPS = "illegal steps"
    """Only in steps that no rule allows, in a runner that does not check its input."""
    AUDIT = "audit"
    """In the audit of the simulator; the suite has no mutant with this fault."""


class FaultClass(StrEnum):
    """The class of a fault, in the words of bug reports."""

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
    """A known bug.

    Parameters
    ----------
    name : str
        The id of the fault, as a user types it.
    kind : Kind
        The object that it changes, which determines the arguments of `change`.
    fault_class : FaultClass
    rules : tuple of str
        The ids of the rules that it breaks, and of the rules by which it is detected.
    citations : tuple of str
        Reports of this bug, as :func:`~paged_mla_reference.faults.reports.link` accepts them.
    akin : tuple of str
        Reports of similar bugs.
    what : str
        A sentence that describes the wrong behavior.
    change : callable
        Makes a right object wrong.
    shows : Shows
    """

    name: str
    kind: Kind
    fault_class: FaultClass
    rules: tuple[str, ...]
    citations: tuple[str, ...]
    akin: tuple[str, ...]
    what: str
    change: Callable[..., Any]
    shows: Shows = Shows.ANSWERS


Declare = Callable[[Callable[..., Any]], Fault]
"""A decorator that makes a function or class the change of a fault with its name and docstring."""


def kernel_fault(
    fault_class: FaultClass,
    *rules: str,
    cites: str = "",
    akin: str = "",
    through: Callable[[Any, Callable[..., Any]], Any] | None = None,
) -> Declare:
    """Declare a fault of a kernel.

    Parameters
    ----------
    fault_class : FaultClass
    *rules : str
    cites, akin : str
        Citations of this bug, and of similar bugs, separated by spaces.
    through : callable or None
        Takes the right oracle and the decorated function, and returns the wrong oracle. If it is
        ``None``, the decorated function takes the right oracle and returns the wrong one.
    """
    declare = _declare(Kind.KERNEL, fault_class, rules, (cites, akin), Shows.ANSWERS)
    if through is None:
        return declare
    return lambda change: replace(declare(change), change=partial(_through, through, change))


def _through(make: Callable[..., Any], change: Callable[..., Any], oracle: Any) -> Any:
    return make(oracle, change)


def runner_fault(
    fault_class: FaultClass,
    *rules: str,
    cites: str = "",
    akin: str = "",
    shows: Shows = Shows.ANSWERS,
) -> Declare:
    """Declare a fault of a runner.

    `shows` is that of :class:`Fault`; the other parameters are those of :func:`kernel_fault`.
    """
    return _declare(Kind.RUNNER, fault_class, rules, (cites, akin), shows)


def engine_fault(
    fault_class: FaultClass,
    *rules: str,
    cites: str = "",
    akin: str = "",
    shows: Shows = Shows.ANSWERS,
) -> Declare:
    """Declare a fault of an engine.

    `shows` is that of :class:`Fault`; the other parameters are those of :func:`kernel_fault`.
    """
    return _declare(Kind.ENGINE, fault_class, rules, (cites, akin), shows)


def _declare(
    kind: Kind,
    fault_class: FaultClass,
    rules: tuple[str, ...],
    reports: tuple[str, str],
    shows: Shows,
) -> Declare:
    """Return a decorator that makes a fault; `reports` are the texts `cites` and `akin`."""
    cites, akin = reports

    def declare(change: Callable[..., Any]) -> Fault:
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", change.__name__)
        return Fault(
            name=words.replace("_", "-").lower(),
            kind=kind,
            fault_class=fault_class,
            rules=rules,
            citations=tuple(cites.split()),
            akin=tuple(akin.split()),
            what=" ".join((change.__doc__ or "").split()),
            change=change,
            shows=shows,
        )

    return declare


def faults_of(modules: Iterable[ModuleType]) -> dict[str, Fault]:
    """Return all faults that `modules` define, by name, in the order of their definitions.

    Raises
    ------
    ValueError
        Two faults have the same name.
    """
    found: dict[str, Fault] = {}
    for module in modules:
        for value in vars(module).values():
            if not isinstance(value, Fault):
                continue
            if value.name in found:
                raise ValueError(f"two faults have the name {value.name!r}; rename one")
            found[value.name] = value
    return found
