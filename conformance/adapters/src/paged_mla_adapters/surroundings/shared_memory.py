"""NaN in shared memory before a kernel starts, which shows reads of unwritten memory."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from paged_mla_adapters.surroundings import switch

NAN = -1  # a word of 32 bits that is NaN as every floating-point type
_WAVES = 2  # programs for each multiprocessor, so that every multiprocessor runs at least one


def fill_shared_memory(device: torch.device, word: int | None = None) -> None:
    """Fill the shared memory of every multiprocessor with a word, on the current stream.

    The word is NaN by default, or 0 where ``PAGED_MLA_SURROUNDINGS`` is ``zeros-in-shared-memory``.
    The function does nothing on a CPU, without Triton, and on a GPU older than Ampere.
    """
    if word is None:
        word = 0 if switch.value() == switch.SHARED_MEMORY else NAN
    if not can_fill(device):
        return
    from paged_mla_adapters.surroundings.kernels import (  # noqa: PLC0415 - it needs Triton
        shared_memory as kernel,
    )

    properties: Any = torch.cuda.get_device_properties(device)
    read = torch.empty(kernel.PIECE // 4, dtype=torch.int32, device=device)
    pieces = properties.shared_memory_per_block_optin // kernel.PIECE
    programs = (_WAVES * properties.multi_processor_count,)
    kernel.fill_shared_memory[programs](read, pieces - 1, PIECES=pieces, WORD=word, num_warps=4)


@cache
def can_fill(device: torch.device) -> bool:
    """Return whether :func:`fill_shared_memory` supports a device."""
    if device.type != "cuda":
        return False
    return find_spec("triton") is not None and torch.cuda.get_device_capability(device) >= (8, 0)
