"""The variable by which an operator has every step checked."""

from __future__ import annotations

import os

from paged_mla_shared.errors import InvalidArgument

CHECK_VARIABLE = "PAGED_MLA_CHECK"
"""1 has every eager plan, and every load of a graph's inputs, hold its values against the rules."""


def checks_values() -> bool:
    """Return whether steps are checked: the variable is 1, not 0 or unset.

    Raises
    ------
    InvalidArgument
        It is neither; names the variable.
    """
    value = os.environ.get(CHECK_VARIABLE, "0")
    if value not in {"0", "1"}:
        raise InvalidArgument(CHECK_VARIABLE, repr(value), "0 or 1, or unset")
    return value == "1"
