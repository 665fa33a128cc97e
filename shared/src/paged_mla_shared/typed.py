"""Convert JSON values to dataclasses; errors name the place of a wrong value."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from paged_mla_shared.errors import InvalidArgument

_PLAIN: dict[Any, tuple[str, tuple[type, ...]]] = {
    NoneType: ("null", (NoneType,)),
    bool: ("true or false", (bool,)),
    int: ("a 64-bit integer", (int,)),
    float: ("a number", (int, float)),
    str: ("a string", (str,)),
}


def build(kind: Any, value: Any, where: str) -> Any:
    """Convert `value` to the type `kind`: the inverse of ``dataclasses.asdict``.

    Parameters
    ----------
    kind : type
        A dataclass, ``StrEnum``, ``None``, ``bool``, ``int``, ``float`` or ``str``; a ``tuple`` or
        ``dict`` or union of those; or ``Any``.
    value : Any
        A value of types that JSON has. A ``bool`` does not count as a number.
    where : str
        The file of the value; error messages begin with it.

    Raises
    ------
    InvalidArgument
        A field is unknown or missing, a value has another type, or its dataclass rejects it.
    """
    try:
        return _build(kind, value)
    except InvalidArgument as error:
        raise error.inside(where) from None


def _build(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if kind in _PLAIN:
        return _plain(kind, value)
    if (origin := get_origin(kind)) is not None:
        compound = {UnionType: _union, tuple: _tuple, dict: _dict}[origin]
        return compound(get_args(kind), value)
    if is_dataclass(kind):
        return _record(kind, value)
    return _enum(kind, value)


def _enum(kind: type[StrEnum], value: Any) -> StrEnum:
    if not isinstance(value, str) or value not in list(kind):
        raise InvalidArgument("", reprlib.repr(value), f"one of {', '.join(kind)}")
    return kind(value)


def _plain(kind: Any, value: Any) -> Any:
    allowed, types = _PLAIN[kind]
    if type(value) not in types or (type(value) is int and not -(2**63) <= value < 2**63):
        raise InvalidArgument("", reprlib.repr(value), allowed)
    if kind is str and not value.isascii() and any("\ud800" <= c <= "\udfff" for c in value):
        raise InvalidArgument("", ascii(value[:30]), "a string without unpaired surrogates")
    return float(value) if kind is float else value


def _union(kinds: tuple[Any, ...], value: Any) -> Any:
    if value is None and NoneType in kinds:
        return None
    some = [kind for kind in kinds if kind is not NoneType]
    for kind in some[:-1]:
        try:
            return _build(kind, value)
        except InvalidArgument:
            continue
    return _build(some[-1], value)


def _tuple(kinds: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise InvalidArgument("", reprlib.repr(value), "a list")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise InvalidArgument("", reprlib.repr(value), f"{len(kinds)} entries")
    done: list[Any] = []
    try:
        for kind, item in zip(kinds, value, strict=True):
            done.append(_build(kind, item))
    except InvalidArgument as error:
        raise _below(f"[{len(done)}]", error) from None
    return tuple(done)


def _dict(kinds: tuple[Any, Any], value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise InvalidArgument("", reprlib.repr(value), "an object")
    return {
        _at(name, _build, kinds[0], name): _at(name, _build, kinds[1], item)
        for name, item in value.items()
    }


def _record(kind: Any, value: Any) -> Any:
    if not isinstance(value, dict):
        raise InvalidArgument("", reprlib.repr(value), "an object")
    hints = _hints(kind)
    if unknown := value.keys() - hints.keys():
        given = f"an unknown field {reprlib.repr(min(unknown))}"
        raise InvalidArgument("", given, ", ".join(hints))
    for field in fields(kind):
        if field.name not in value and field.default is MISSING:
            raise InvalidArgument(field.name, "no value", "a value; the field is required")
    return kind(**{name: _at(name, _build, hints[name], item) for name, item in value.items()})


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _at(place: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the function's result; its errors name `place`."""
    try:
        return function(*arguments)
    except InvalidArgument as error:
        raise _below(reprlib.repr(place)[1:-1], error) from None


def _below(place: str, error: InvalidArgument) -> InvalidArgument:
    """Return the error with `place` in front of its argument, as a path."""
    dot = "." if error.argument and not error.argument.startswith("[") else ""
    return InvalidArgument(f"{place}{dot}{error.argument}", error.given, error.allowed)
