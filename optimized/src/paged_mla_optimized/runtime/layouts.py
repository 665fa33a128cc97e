"""A cache of argument layouts that passed their checks, since repeated checks cost host time."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paged_mla_optimized.runtime.bounded import Bounded

MAX_LAYOUTS = 4096
"""The number of layouts that are stored; after that, all are dropped."""


def known_layouts() -> Bounded[Hashable, None]:
    """Return an empty cache for argument layouts that passed the checks of an operation."""
    return Bounded(MAX_LAYOUTS)


def layout_of(*tensors: torch.Tensor | None) -> Hashable:
    """Return all properties that checks depend on, or ``None`` if an argument has no address."""
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
