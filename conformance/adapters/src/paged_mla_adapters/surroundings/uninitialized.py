"""Memory that nobody has initialised, full of NaN while a kernel is called."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Let ``torch.empty`` and its family return NaN, or the largest integers, inside.

    torch fills them in its deterministic mode, those that a library allocates in C++ too. What else
    that mode asks for is only warned of, and the warnings are left out; it ends with the call.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    setting: Any = torch.utils.deterministic  # a module whose attribute is made by its class
    filled = setting.fill_uninitialized_memory
    try:
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        setting.fill_uninitialized_memory = True
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        setting.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(mode=deterministic, warn_only=warn_only)
