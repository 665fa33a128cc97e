"""Replace functions temporarily; faults are built from such replacements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(*places: tuple[object, str, Any]) -> Iterator[None]:
    """Replace attributes of modules and classes while the context is open.

    Parameters
    ----------
    *places : (object, str, object)
        A module or class, the name of its attribute, and the new value.
    """
    kept = [(place, name, vars(place)[name]) for place, name, _ in places]
    for place, name, value in places:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in kept:
            setattr(place, name, value)
