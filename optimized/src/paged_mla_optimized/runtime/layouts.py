"""A cache of argument layouts that passed their checks, since repeated checks cost host time."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paged_mla_optimized.runtime.bounded import Bounded

MAX_LAYOUTS = 4096
"""The most layouts that a cache stores; a full cache drops all layouts."""


def known_layouts() -> Bounded[Hashable, None]:
    """Return an empty cache for argument layouts that passed the checks of an operation."""
    return Bounded(MAX_LAYOUTS)


def layout_of(*tensors: torch.Tensor | None) -> Hashable:
    """Return all properties on which checks depend, except the values of elements.

    The result is ``None`` if an argument is neither ``None`` nor a tensor with an address.
    """
    try:
        return tuple(
            [
                None
                if t is None
                else (t.data_ptr(), t.shape, t.stride(), t.dtype, t.device, t.is_neg())
                for t in tensors
            ]
        )
    except (AttributeError, TypeError, RuntimeError):  # sparse tensors have no address
        return None
