"""How wide guard zones are around the tensors of a call, and what lies in them."""

from __future__ import annotations

import torch

from paged_mla_adapters.guards import Guards
from paged_mla_adapters.surroundings import switch

_MARGINS = {"cuda": 1 << 20, "cpu": 64 << 10}  # bytes; on a CPU wider ones take most of the time
FILLING = 0xFF  # as every byte: NaN in every type of floating point


def guards_of(device: torch.device) -> Guards:
    """Return an allocator of tensors between zones of NaN, or of zeros where these are chosen."""
    filling = 0 if switch.value() == switch.GUARD_ZONES else FILLING
    return Guards(device, margin=_MARGINS[device.type], filling=filling)
