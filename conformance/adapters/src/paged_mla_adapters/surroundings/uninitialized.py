"""Uninitialized memory of torch, which is full of NaN during a call of a kernel."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paged_mla_adapters.surroundings import switch

_EMPTY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


class _Zeros(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types
    """Makes ``torch.empty`` and its family return zeros."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call an operation of torch; fill the result of one in ``_EMPTY`` with zeros."""
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket.__name__ in _EMPTY else found


@contextmanager
def uninitialized_is_nan() -> Iterator[None]:
    """Make ``torch.empty`` and similar functions return NaN, or the largest integers.

    Where ``PAGED_MLA_SURROUNDINGS`` is ``zeros-in-buffers`` they return zeros instead.

    torch's deterministic mode fills uninitialized tensors, also tensors that a library allocates in
    C++. For the other effects of this mode torch only warns, and these warnings are hidden. The
    settings of torch are restored at the end of the context.
    """
    if switch.value() == switch.BUFFERS:
        with _Zeros():  # type: ignore[no-untyped-call]  # torch has no types
            yield
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    setting: Any = torch.utils.deterministic  # a module whose class defines the attribute
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
