"""Launches of one part of a step's keys: which they are, and how its answer joins the others'."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.kernels.common.merge_tiles import merge_tiles_kernel
from paged_mla_optimized.kernels.common.parts import part_kernel
from paged_mla_optimized.launchers.prefill import PrefillPlan
from paged_mla_optimized.runtime.launch import Launcher

_LINES = 16  # of one program of a merge


class Part:
    """Launcher of ``part_kernel``, and the buffers it fills.

    Parameters
    ----------
    max_rows : int
    room : int
        Lines of the workspace.
    device : torch.device
    """

    def __init__(self, max_rows: int, room: int, device: torch.device) -> None:
        self._room = room
        self._buffers = torch.zeros((3, max_rows + 1), dtype=torch.int32, device=device)
        self.num_rows = 0
        self._kernel = Launcher(part_kernel, part_constants(max_rows))

    @property
    def query_starts(self) -> torch.Tensor:
        """Prefix sums of the rows' queries, from 0, int32 [B + 1]."""
        return self._buffers[0, : self.num_rows + 1]

    @property
    def key_starts(self) -> torch.Tensor:
        """Prefix sums of the rows' keys in this part, int32 [B + 1]."""
        return self._buffers[1, : self.num_rows + 1]

    @property
    def firsts(self) -> torch.Tensor:
        """The first of each row's keys in this part, int32 [B]."""
        return self._buffers[2, : self.num_rows]

    def fill(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, part: int) -> None:
        """Describe a part of the keys of some rows. One launch."""
        self.num_rows = seq_lens.shape[0]
        strides = (*cu_seqlens_q.stride(), *seq_lens.stride())
        self._kernel(
            (1, 1, 1),
            strides,
            (cu_seqlens_q, seq_lens, *self._buffers),
            (*strides, self.num_rows, part, self._room),
        )


class MergeTiles:
    """Launcher of ``merge_tiles_kernel``.

    Parameters
    ----------
    tile_m : int
        Tokens of a query tile of the chunk's plan.
    v_head_dim : int
    """

    def __init__(self, tile_m: int, v_head_dim: int) -> None:
        constants = merge_tiles_constants(tile_m, v_head_dim)
        self._shares = tile_m // constants["LINES"]
        self._kernel = Launcher(merge_tiles_kernel, constants)

    def launch(
        self,
        plan: PrefillPlan,
        answer: tuple[torch.Tensor, torch.Tensor],
        rest: torch.Tensor,
        chunk: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Merge `chunk`, which has what `plan` has tiles of, into `answer` and its `rest`.

        Both are (out, lse); `rest` and `chunk` are dense.
        """
        out, lse = answer
        num_heads = out.shape[1]
        strides = (*out.stride()[:2], *lse.stride())
        self._kernel(
            (plan.most_tiles * self._shares * num_heads, 1, 1),
            (strides[:2], num_heads),
            (plan.tiles, plan.work, out, lse, rest, *chunk),
            (*strides, num_heads),
        )


def part_constants(max_rows: int) -> dict[str, Any]:
    """Return what ``part_kernel`` is specialised for."""
    return {"ROWS": triton.next_power_of_2(max_rows + 1)}


def merge_tiles_constants(tile_m: int, v_head_dim: int) -> dict[str, Any]:
    """Return what ``merge_tiles_kernel`` is specialised for."""
    return {"V": v_head_dim, "TILE_M": tile_m, "LINES": min(tile_m, _LINES)}
