"""Launches the merge of a chunk's answer into the answer so far."""

from __future__ import annotations

from typing import Any

import torch

from paged_mla_optimized.kernels.common.merge_tiles import merge_tiles_kernel
from paged_mla_optimized.launchers.prefill import PrefillPlan
from paged_mla_optimized.runtime.launch import Launcher

_LINES = 16  # of one program


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


def merge_tiles_constants(tile_m: int, v_head_dim: int) -> dict[str, Any]:
    """Return what ``merge_tiles_kernel`` is specialised for."""
    return {"V": v_head_dim, "TILE_M": tile_m, "LINES": min(tile_m, _LINES)}
