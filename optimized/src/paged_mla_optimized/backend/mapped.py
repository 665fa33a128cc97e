"""Run steps that are planned from a request map, as in SGLang, instead of block tables."""

from __future__ import annotations

import torch

from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.tensors.step import RequestMap

_NO_SLOT = 2**31 - 1


class MappedRunner(EagerRunner):
    """A runner that converts each block table to a request map, from which ``plan`` rebuilds it."""

    def _table(self, tensors: dict[str, torch.Tensor]) -> RequestMap:
        """Return the slots of every row, with reversed lines, and no slot after a row's tokens."""
        lens, table = tensors["seq_lens"], tensors["block_table"]
        size, rows = self._mla.config.block_size, len(lens)
        key = torch.arange(table.shape[1] * size, device=lens.device)
        slots = table.repeat_interleave(size, dim=1).long() * size + key % size
        slots = torch.where(key < lens[:, None], slots, _NO_SLOT)
        slots = slots.clamp(-(2**31), _NO_SLOT).int()  # for blocks outside of every cache
        lines = torch.arange(rows, device=lens.device).flip(0)
        return RequestMap(slots.flip(0), torch.where(lens > 0, lines, _NO_SLOT))
