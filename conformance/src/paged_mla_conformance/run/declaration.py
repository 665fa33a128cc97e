"""Checks of a backend's declaration, made before the first test.

Without these checks, a misspelled feature would only make tests "not supported".
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import cast

import pytest

from paged_mla_conformance.suite.selection.core import ALL_DTYPES, CORE
from paged_mla_reference.backend import CAPABILITIES
from paged_mla_reference.simulator.config import LARGEST_BLOCK_SIZE
from paged_mla_reference.simulator.scenario import MOST_HEADS
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

_WORDS = {  # the reference declares every word that the protocol has
    "ops": CAPABILITIES.ops,
    "dtypes": frozenset(ALL_DTYPES),
    "cache_formats": CAPABILITIES.cache_formats,
    "masks": CAPABILITIES.masks,
    "ropes": CAPABILITIES.ropes,
    "features": CAPABILITIES.features,
}

_TUPLES = {
    "head_dims": (2, "pairs of integers (R, P) >= 1 of type int"),
    "prefill_dims": (3, "triples of integers (N, P, V) >= 1 of type int"),
}

_TESTABLE = {"num_heads": MOST_HEADS, "block_sizes": LARGEST_BLOCK_SIZE}  # by the suite's steps


def _is_size(value: object) -> bool:
    # NumPy's integers overflow, and JSON cannot represent them.
    return type(value) is int and value >= 1


def _is_scale(value: object) -> bool:
    return value is None or (type(value) is float and 0 < value < math.inf)


_SINGLE: dict[str, tuple[Callable[[object], bool], str]] = {
    "products": (lambda value: value in PRODUCTS, " or ".join(map(repr, PRODUCTS))),
    "max_query_len": (lambda value: value == 0 or _is_size(value), "an integer >= 0 of type int"),
    "softmax_scale": (_is_scale, "None, or a float > 0"),
}


def check_backend(name: str, backend: object) -> Backend:
    """Return an object as a backend after checking its attributes and its capabilities.

    Parameters
    ----------
    name : str
        The value of ``--backend``, for error messages.
    backend : object
        The object that a factory returned.

    Raises
    ------
    pytest.UsageError
        An attribute of the protocol is missing or has the wrong type, or a capability has a value
        that the protocol does not define.
    """
    missing = [attribute for attribute in _ATTRIBUTES if not hasattr(backend, attribute)]
    if missing:
        made = type(backend).__name__
        raise pytest.UsageError(
            f"--backend {name}: the factory returned a {made} without the attributes "
            f"{', '.join(missing)}"
        )
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
        if field in _TESTABLE and min(value, default=1) > _TESTABLE[field]:
            allowed = f"at least one integer from 1 to {_TESTABLE[field]}"
            raise _refusal(name, where, sorted(value), allowed)


def _not_allowed(field: str, member: object) -> str:
    """Return a text with the allowed members of a field, or "" if `member` is allowed."""
    if field in _WORDS:
        return "" if member in _WORDS[field] else ", ".join(sorted(_WORDS[field]))
    if field in _TUPLES:
        length, allowed = _TUPLES[field]
        fits = isinstance(member, tuple) and len(member) == length
        return "" if fits and all(map(_is_size, cast("tuple[object, ...]", member))) else allowed
    return "" if _is_size(member) else "integers >= 1 of type int"


def _refusal(name: str, what: str, given: object, allowed: str) -> pytest.UsageError:
    return pytest.UsageError(f"--backend {name}: {what}: got {given!r}; allowed: {allowed}")
