"""Integers that the host gives: NumPy's are as good as Python's, which is what launches take."""

from __future__ import annotations

import operator
from typing import Any

from paged_mla_shared.errors import InvalidArgument


def integer(name: str, value: Any) -> int:
    """Return an argument as Python's integer; ``InvalidArgument`` names it if it is none."""
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(name, value, "an integer") from None


def take_integers(config: object, *names: str) -> None:
    """Leave Python's integers in fields of a frozen dataclass, see :func:`integer`."""
    for name in names:
        object.__setattr__(config, name, integer(name, getattr(config, name)))
