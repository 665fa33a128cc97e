"""What a backend declares, checked before the first test: a misspelt word would only be a skip."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import cast

import pytest

from paged_mla_conformance.suite.selection.core import ALL_DTYPES, CORE
from paged_mla_reference.backend import CAPABILITIES
from paged_mla_shared.backend import PRODUCTS, Backend, Capabilities

_ATTRIBUTES: dict[str, type] = {
    "name": str,
    "version": str,
    "mode": str,
    "device": str,
    "memory_bytes": numbers.Integral,
    "capabilities": Capabilities,
    "prepare": object,
}

_WORDS = {  # the reference does everything there is
    "ops": CAPABILITIES.ops,
    "dtypes": frozenset(ALL_DTYPES),
    "cache_formats": CAPABILITIES.cache_formats,
    "masks": CAPABILITIES.masks,
    "ropes": CAPABILITIES.ropes,
    "features": CAPABILITIES.features,
}

_TUPLES = {
    "head_dims": (2, "pairs of integers (R, P) of type int"),
    "prefill_dims": (3, "triples of integers (N, P, V) of type int"),
}


def _is_integer(value: object) -> bool:
    return type(value) is int  # those of NumPy overflow, and no report can hold them


def _is_scale(value: object) -> bool:
    return value is None or (type(value) is float and 0 < value < math.inf)


_SINGLE: dict[str, tuple[Callable[[object], bool], str]] = {
    "products": (lambda value: value in PRODUCTS, " or ".join(map(repr, PRODUCTS))),
    "max_query_len": (_is_integer, "an integer of type int"),
    "softmax_scale": (_is_scale, "None, or a float > 0"),
}


def check_backend(name: str, backend: object) -> Backend:
    """Return what a factory made, which is a backend.

    Parameters
    ----------
    name : str
        How the user calls it.
    backend : object

    Raises
    ------
    pytest.UsageError
        It lacks an attribute of the protocol, or declares what nobody knows.
    """
    missing = [attribute for attribute in _ATTRIBUTES if not hasattr(backend, attribute)]
    if missing:
        made = type(backend).__name__
        raise pytest.UsageError(f"--backend {name} made a {made} without {', '.join(missing)}")
    for attribute, kind in _ATTRIBUTES.items():
        value = getattr(backend, attribute)
        if not isinstance(value, kind):
            raise _refusal(name, attribute, value, kind.__name__)
    checked = cast("Backend", backend)
    if not callable(checked.prepare):
        raise _refusal(name, "prepare", checked.prepare, "a method")
    if checked.mode not in CORE:
        raise _refusal(name, "mode", checked.mode, ", ".join(sorted(CORE)))
    _check_capabilities(name, checked.capabilities)
    if "bounded" in checked.capabilities.features:
        unchecked = getattr(backend, "prepare_unchecked", None)
        if not callable(unchecked):
            raise _refusal(name, "prepare_unchecked", unchecked, "a method, to declare 'bounded'")
    return checked


def _check_capabilities(name: str, capabilities: Capabilities) -> None:
    for field, value in vars(capabilities).items():
        where = f"capabilities.{field}"
        if field in _SINGLE:
            fits, allowed = _SINGLE[field]
            if not fits(value):
                raise _refusal(name, where, value, allowed)
            continue
        if not isinstance(value, frozenset):
            raise _refusal(name, where, value, "frozenset")
        for member in value:
            allowed = _not_allowed(field, member)
            if allowed:
                raise _refusal(name, where, member, allowed)


def _not_allowed(field: str, member: object) -> str:
    """Return what would be allowed in a field, empty if `member` is."""
    if field in _WORDS:
        return "" if member in _WORDS[field] else ", ".join(sorted(_WORDS[field]))
    if field in _TUPLES:
        length, allowed = _TUPLES[field]
        fits = isinstance(member, tuple) and len(member) == length
        return "" if fits and all(map(_is_integer, cast("tuple[object, ...]", member))) else allowed
    return "" if _is_integer(member) else "integers of type int"


def _refusal(name: str, what: str, given: object, allowed: str) -> pytest.UsageError:
    return pytest.UsageError(f"--backend {name}: {what}: got {given!r}; allowed: {allowed}")
