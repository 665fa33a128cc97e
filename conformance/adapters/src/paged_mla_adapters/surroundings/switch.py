"""The environment variable that turns surroundings off, for comparisons of times."""

from __future__ import annotations

import os

VARIABLE = "PAGED_MLA_SURROUNDINGS"


def is_on() -> bool:
    """Return whether calls get their surroundings: unless ``PAGED_MLA_SURROUNDINGS=off``.

    Raises
    ------
    ValueError
        The variable has another value.
    """
    value = os.environ.get(VARIABLE, "on")
    if value not in {"on", "off"}:
        raise ValueError(f"{VARIABLE}: got {value!r}; allowed: on, off")
    return value == "on"
