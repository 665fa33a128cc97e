"""Layouts and addresses of arguments that passed their checks: looking again costs host time."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paged_mla_optimized.runtime.bounded import Bounded

MAX_LAYOUTS = 4096
"""Layouts that are known to be right before all are forgotten."""


def known_layouts() -> Bounded[Hashable, None]:
    """Return a place for the layouts of an operation's arguments that passed."""
    return Bounded(MAX_LAYOUTS)


def layout_of(*tensors: torch.Tensor | None) -> Hashable:
    """Return all that checks look at; nothing that has passed them if one is no tensor."""
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
