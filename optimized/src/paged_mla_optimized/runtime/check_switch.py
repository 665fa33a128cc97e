"""The variable by which an operator has every step checked."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_optimized.runtime.device import is_capturing
from paged_mla_shared.errors import InvalidArgument

CHECK_VARIABLE = "PAGED_MLA_CHECK"
"""1 has every eager plan, and every load of a graph's inputs, hold its values against the rules."""


class CheckSwitch:
    """Whether an object checks the values it is given: what the environment said as it was made.

    Parameters
    ----------
    device : torch.device

    Raises
    ------
    InvalidArgument
        The variable is neither 0 nor 1 nor unset; names it.
    """

    def __init__(self, device: torch.device) -> None:
        value = os.environ.get(CHECK_VARIABLE, "0")
        if value not in {"0", "1"}:
            raise InvalidArgument(CHECK_VARIABLE, repr(value), "0 or 1, or unset")
        self._device, self._is_on = device, value == "1"

    @property
    def is_on(self) -> bool:
        """Whether to check now: not in a capture, since a check waits for the device."""
        return self._is_on and not is_capturing(self._device)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Check nothing within: steps of a warm-up mean nothing."""
        before, self._is_on = self._is_on, False
        try:
            yield
        finally:
            self._is_on = before
