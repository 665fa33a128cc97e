"""What the protocol declares of an operation beside its method of the runner.

Runners that lie around another one, such as the protocol guard and the translation of a profile,
treat every operation by this declaration, so that a new one needs no method there.
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
    """One call of a runner that a backend may declare.

    Parameters
    ----------
    name : str
        Of the method, and its word in ``Capabilities.ops``.
    takes : type
        Of the first argument.
    returns : type or None
        Of the result: a dataclass, ``tuple``, or an array's.
    arrays : mapping of str to int
        The arrays of the result, in order, and how many axes each has.
    reads_rows : bool
        Whether the result is of the rows of a step and what the cache holds of them, not of its
        tokens, and is exact. The call then writes nothing. Profiles leave the lengths of padded
        rows alone, and the search asks it of every step.
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
        method.operation = declared  # type: ignore[attr-defined] # functions have what one sets
        return method

    return declare


def operations_of(runner: type) -> dict[str, Operation]:
    """Return the operations that a protocol declares, by name, in order."""
    declared = (getattr(method, "operation", None) for method in vars(runner).values())
    return {found.name: found for found in declared if found is not None}
