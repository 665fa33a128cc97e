"""Launches the Gluon kernels for Hopper, where the problem and its tensors suit them.

They copy keys by TMA, which wants the cache to be rows of one stride: blocks a whole number of
rows apart, and rows on 16 bytes.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.decode_few_hopper import decode_few_kernel
from paged_mla_optimized.kernels.decode_tile_hopper import decode_tile_kernel
from paged_mla_optimized.launch import Launcher, aligned
from paged_mla_optimized.plan import Plan
from paged_mla_optimized.variants import FEW, AttendVariant

_TILE_N = 64
_STAGES = 2  # of the ring for few queries; the other one has three
_FEW_REGISTERS = 152  # on average: 256 for those that compute, 48 for the one that copies
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def cache_fits(cache: torch.Tensor) -> bool:
    """Return whether TMA can address `cache` [num_blocks, block_size, R + P] as rows."""
    stride_block, stride_token, _ = cache.stride()
    return (
        cache.data_ptr() % 16 == 0
        and stride_token >= cache.shape[2]
        and stride_token * cache.element_size() % 16 == 0
        and stride_block >= stride_token
        and stride_block % stride_token == 0
        and cache.shape[0] * (stride_block // stride_token) < 2**31
    )


class HopperAttention:
    """Launcher of one Gluon kernel; keeps the descriptors of the caches it has seen.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
        Of family "few" or "tile".
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant) -> None:
        self.config = config
        self.variant = variant
        self._kernels: dict[tuple[int, int], Launcher] = {}
        self._descriptors: dict[tuple[int, ...], tuple[TensorDescriptor, TensorDescriptor]] = {}

    def launch(
        self,
        plan: Plan,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        cache: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        partial_out: torch.Tensor,
        partial_lse: torch.Tensor,
        programs: int,
    ) -> None:
        """Write `out` and `lse` of every whole group, and partials of the others."""
        table = plan.block_table
        strides = (q_nope.stride(), q_pe.stride(), table.stride(1), out.stride())
        self._kernel(cache.stride(0) // cache.stride(1), cache.stride(1))(
            (programs, 1, 1),
            strides if aligned(q_nope, q_pe, table, out, lse) else None,
            q_nope,
            q_pe,
            table,
            plan.unit_starts,
            plan.cut,
            plan.part_units,
            plan.part_rows,
            plan.token_starts,
            plan.row_lens,
            plan.tree_words,
            cache,
            out,
            lse,
            partial_out,
            partial_lse,
            *self._descriptors_of(cache),
            *q_nope.stride()[:2],
            *q_pe.stride()[:2],
            *table.stride(),
            *out.stride()[:2],
            *lse.stride(),
            self.config.softmax_scale,
        )

    def _kernel(self, block_rows: int, stride_row: int) -> Launcher:
        geometry = (block_rows, stride_row)
        if geometry not in self._kernels:
            self._kernels[geometry] = Launcher(
                hopper_kernel(self.variant),
                hopper_constants(self.config, self.variant, *geometry),
                **hopper_options(self.variant),
            )
        return self._kernels[geometry]

    def _descriptors_of(self, cache: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Return descriptors of the latent and of the rope columns, made once for each cache."""
        key = (cache.data_ptr(), cache.shape[0], *cache.stride())
        if key not in self._descriptors:
            num_blocks, block_size, width = cache.shape
            stride_block, stride_token, _ = cache.stride()
            rows = (num_blocks - 1) * (stride_block // stride_token) + block_size
            flat = cache.as_strided((rows, width), (stride_token, 1))
            ckv_box, k_pe_box = hopper_boxes(self.config, self.variant)
            self._descriptors[key] = (
                TensorDescriptor.from_tensor(flat, ckv_box, LAYOUT),
                TensorDescriptor.from_tensor(flat, k_pe_box, LAYOUT),
            )
        return self._descriptors[key]


def hopper_kernel(variant: AttendVariant) -> Any:
    """Return the kernel of a family."""
    return decode_few_kernel if variant.family == FEW else decode_tile_kernel


def hopper_options(variant: AttendVariant) -> dict[str, int]:
    """Return the launch options of a family."""
    options = {"num_warps": 4, "launch_pdl": True}  # it waits itself for the kernel before it
    return options | ({"maxnreg": _FEW_REGISTERS} if variant.family == FEW else {})


def hopper_box(block_size: int) -> int:
    """Return the keys of one copy: a block, or a tile of a larger one; 0 where none fits."""
    if block_size % _TILE_N == 0:
        return _TILE_N
    return block_size if block_size in {8, 16, 32} else 0  # swizzled in eights


def hopper_boxes(config: MlaConfig, variant: AttendVariant) -> tuple[list[int], list[int]]:
    """Return what one copy takes of the latent columns, whole or halved, and of the others."""
    keys = hopper_box(config.block_size) or _TILE_N
    return [keys, 512 if variant.family == FEW else 256], [keys, 64]


def hopper_constants(
    config: MlaConfig, variant: AttendVariant, block_rows: int, stride_row: int
) -> dict[str, Any]:
    """Return what a kernel is specialised for.

    `block_rows` is the stride of a block in rows of the cache, `stride_row` that of a row.
    """
    constants = {
        "num_heads": config.num_heads,
        "block_size": config.block_size,
        "block_rows": block_rows,
        "stride_cache_row": stride_row,
        "MASK": "tree" if config.is_tree else config.mask,
        "TREE_WORDS": config.tree_words,
        "BOX": hopper_box(config.block_size),
    }
    if variant.family == FEW:
        constants |= {"TILE_M": variant.tile_m, "TILE_N": _TILE_N, "STAGES": _STAGES}
    return constants
