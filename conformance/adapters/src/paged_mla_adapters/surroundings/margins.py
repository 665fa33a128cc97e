"""The width and the contents of the guard zones around the tensors of a call."""

from __future__ import annotations

import torch

from paged_mla_adapters.guards import Guards
from paged_mla_adapters.surroundings import switch

_MARGINS = {"cuda": 1 << 20, "cpu": 64 << 10}  # bytes; wider zones dominate the time on a CPU
FILLING = 0xFF  # bytes that make every floating-point number NaN


def guards_of(device: torch.device) -> Guards:
    """Return an allocator that puts tensors between zones of NaN.

    Where ``PAGED_MLA_SURROUNDINGS`` is ``zeros-in-guard-zones`` the zones contain zeros instead.
    """
    filling = 0 if switch.value() == switch.GUARD_ZONES else FILLING
    return Guards(device, margin=_MARGINS[device.type], filling=filling)
