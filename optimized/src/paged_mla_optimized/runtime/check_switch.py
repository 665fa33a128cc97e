"""The environment variable that enables checks of every step."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_optimized.runtime.device import is_capturing
from paged_mla_shared.errors import InvalidArgument

CHECK_VARIABLE = "PAGED_MLA_CHECK"
"""With 1, every eager plan and every load of graph inputs checks the values against the rules."""


class CheckSwitch:
    """The state of ``PAGED_MLA_CHECK`` for one object, read when the object is made.

    Parameters
    ----------
    device : torch.device

    Raises
    ------
    InvalidArgument
        The variable is set to a value other than 0 and 1; the error names it.
    """

    def __init__(self, device: torch.device) -> None:
        value = os.environ.get(CHECK_VARIABLE, "0")
        if value not in {"0", "1"}:
            raise InvalidArgument(CHECK_VARIABLE, repr(value), "0 or 1, or unset")
        self._device, self._is_on = device, value == "1"

    @property
    def is_on(self) -> bool:
        """Whether to check now; false during a graph capture, since checks wait for the device."""
        return self._is_on and not is_capturing(self._device)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable checks inside a with statement, for example for the steps of a warm-up."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before
