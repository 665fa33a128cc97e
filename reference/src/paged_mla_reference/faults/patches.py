"""Temporary replacements of functions, of which faults are made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(*places: tuple[object, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes while open."""
    kept = [(place, name, vars(place)[name]) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in kept:
            setattr(place, name, value)
