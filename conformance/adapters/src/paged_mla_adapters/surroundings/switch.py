"""The environment variable ``PAGED_MLA_SURROUNDINGS``: what surrounds the calls of a kernel.

================================ ===============================================================
value                            meaning
================================ ===============================================================
``on`` (default)                 guard zones, and NaN in all memory that a kernel must not read
``off``                          nothing around the calls, to compare times
``zeros-in-buffers``             as ``on``, with zeros in buffers and in ``torch.empty``
``zeros-in-shared-memory``       as ``on``, with zeros in shared memory
``zeros-in-guard-zones``         as ``on``, with zeros around each tensor
``zeros-in-late-inputs``         as ``on``, with zeros in inputs until the stream writes them
================================ ===============================================================

A run of the suite sets the last four, one after the other, to find where a NaN comes from.
"""

from __future__ import annotations

import os

VARIABLE = "PAGED_MLA_SURROUNDINGS"
BUFFERS = "zeros-in-buffers"
SHARED_MEMORY = "zeros-in-shared-memory"
GUARD_ZONES = "zeros-in-guard-zones"
LATE_INPUTS = "zeros-in-late-inputs"
VALUES = ("on", "off", BUFFERS, SHARED_MEMORY, GUARD_ZONES, LATE_INPUTS)


def value() -> str:
    """Return the value of the variable, one of :data:`VALUES`.

    Raises
    ------
    ValueError
        The variable has another value.
    """
    found = os.environ.get(VARIABLE, "on")
    if found not in VALUES:
        raise ValueError(f"{VARIABLE}: got {found!r}; allowed: {', '.join(VALUES)}")
    return found


def is_on() -> bool:
    """Return whether calls have surroundings: unless the variable is ``off``."""
    return value() != "off"
