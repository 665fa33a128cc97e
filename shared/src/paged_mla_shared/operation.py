"""Declare operations of the protocol, in addition to their methods of the runner.

Runners that wrap another runner, such as the protocol guard and the adapter of a profile, handle
every operation by its declaration. A new operation needs no method in them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A method of a runner that a backend may declare.

    Parameters
    ----------
    name : str
        The name of the method, and its name in ``Capabilities.ops``.
    takes : type
        The type of the first argument.
    returns : type or None
        The type of the result: a dataclass, ``tuple``, or the type of an array.
    arrays : mapping of str to int
        The arrays of the result, in order, and the number of axes of each.
    reads_rows : bool
        Whether the result depends only on the rows of a step and their cached tokens, and is
        exact. The method then writes nothing. Profiles do not change the lengths of padded rows
        for it, and the search tests it with every step.
    """

    name: str
    takes: type
    returns: type | None = None
    arrays: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    reads_rows: bool = False


def operation(
    takes: type,
    returns: type | None = None,
    *,
    reads_rows: bool = False,
    **arrays: int,
) -> Callable[[F], F]:
    """Declare a method of the protocol as an operation; see :class:`Operation`."""

    def declare(method: F) -> F:
        declared = Operation(
            name=method.__name__,
            takes=takes,
            returns=returns,
            arrays=arrays,
            reads_rows=reads_rows,
        )
        method.operation = declared  # type: ignore[attr-defined] # functions accept new attributes
        return method

    return declare


def operations_of(runner: type) -> dict[str, Operation]:
    """Return the operations that a protocol declares, by name, in their order."""
    declared = (getattr(method, "operation", None) for method in vars(runner).values())
    return {found.name: found for found in declared if found is not None}
