"""Launch the merge of a key chunk's output into the output of earlier chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from paged_mla_optimized.kernels.common.merge_tiles import merge_tiles_kernel
from paged_mla_optimized.operations.prefill.portable import PrefillPlan
from paged_mla_optimized.runtime.kernel_spec import KernelSpec, number, pointer
from paged_mla_optimized.runtime.launch import Launcher

if TYPE_CHECKING:
    from paged_mla_optimized.config.prefill import PrefillConfig

_LINES = 16  # tokens of one program


class MergeTiles:
    """Launcher of ``merge_tiles_kernel``.

    Parameters
    ----------
    tile_m : int
        Tokens of a query tile of the chunk's plan.
    config : PrefillConfig
    """

    def __init__(self, tile_m: int, config: PrefillConfig) -> None:
        spec = merge_tiles_spec(tile_m, config)
        self._shares = tile_m // spec.constants["LINES"]
        self._kernel = Launcher(spec)

    def launch(
        self,
        plan: PrefillPlan,
        answer: tuple[torch.Tensor, torch.Tensor],
        rest: torch.Tensor,
        chunk: tuple[torch.Tensor, torch.Tensor],
    ) -> None:
        """Merge `chunk` into `answer` and `rest`, for the query tiles of `plan`.

        `answer` and `chunk` are (out, lse). `rest` [T, H, V] is the rounding error of the output.
        `rest` and `chunk` are dense.
        """
        out, lse = answer
        num_heads = out.shape[1]
        strides = (*out.stride()[:2], *lse.stride())
        self._kernel(
            (plan.most_tiles * self._shares * num_heads, 1, 1),
            (strides[:2], num_heads),
            *(plan.tiles, plan.work, out, lse, rest, *chunk),
            *(*strides, num_heads),
        )


def merge_tiles_spec(tile_m: int, config: PrefillConfig) -> KernelSpec:
    """Return the kernel that merges chunks."""
    answer = pointer(config.dtype)
    types = {
        "tiles_ptr": "*i32",
        "work_ptr": "*i32",
        "out_ptr": answer,
        "lse_ptr": "*fp32",
        "rest_ptr": answer,
        "chunk_out_ptr": answer,
        "chunk_lse_ptr": "*fp32",
        "num_heads": number(config.num_heads),
    }
    constants = {"V": config.v_head_dim, "TILE_M": tile_m, "LINES": min(tile_m, _LINES)}
    return KernelSpec(merge_tiles_kernel, constants, types)
