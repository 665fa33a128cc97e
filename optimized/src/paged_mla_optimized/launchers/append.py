"""Launches the paged scatter of a step's latents."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.cache import LatentCache, scales_and_stride
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.common.append import append_kernel
from paged_mla_optimized.kernels.common.append_fp8 import append_fp8_kernel
from paged_mla_optimized.kernels.common.append_groups import append_groups_kernel
from paged_mla_optimized.planning.families import WITH_E4M3
from paged_mla_optimized.runtime.launch import Launcher

_TOKENS_PER_PROGRAM = 4
_FP8_TOKENS_PER_PROGRAM = 8
_PLACES = 16  # all of a group in blocks of up to 64 tokens
_SLOTS = 1024


class Append:
    """The append launch of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        As ``planning/families.py`` names it.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2]; empty without rope.
    """

    def __init__(
        self, config: MlaConfig, arch: str, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.config = config
        self.tables = tables
        kernel, constants = append_kernel_of(config, arch)
        self._kernel = Launcher(kernel, constants, num_warps=append_warps(config))
        self._tokens = constants.get("TOKENS", 1)

    def launch(
        self,
        ckv: torch.Tensor,
        k_pe: torch.Tensor,
        cache: LatentCache,
        *,
        slot_mapping: torch.Tensor,
        positions: torch.Tensor,
    ) -> None:
        """Write the rows of tokens whose slot is neither negative nor reserved (S-10); T > 0."""
        config, latents = self.config, cache.latents
        scales: tuple[torch.Tensor, ...] = ()
        of_scales: tuple[int, ...] = ()
        if config.is_fp8:
            tensor, stride = scales_and_stride(cache)
            scales, of_scales = (tensor,), (stride,)
        num_tokens = ckv.shape[0]
        strides = ckv.stride(), k_pe.stride(), latents.stride(), slot_mapping.stride()
        self._kernel(
            (triton.cdiv(num_tokens, self._tokens), 1, 1),
            (*strides, of_scales),
            (ckv, k_pe, latents, *scales, slot_mapping, positions, *self.tables),
            (
                ckv.stride(0),
                k_pe.stride(0),
                slot_mapping.stride(0),
                *latents.stride()[:2],
                *of_scales,
                num_tokens,
                config.block_size,
                -1 if config.reserved_slot is None else config.reserved_slot,
            ),
        )


def append_kernel_of(config: MlaConfig, arch: str) -> tuple[Any, dict[str, Any]]:
    """Return the kernel that writes the config's format, and what it is specialised for."""
    constants: dict[str, Any] = {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
    }
    if not config.is_fp8:
        return append_kernel, constants | {"TOKENS": _TOKENS_PER_PROGRAM}
    constants["NATIVE"] = arch in WITH_E4M3
    if config.scales == "per_group":
        return append_groups_kernel, constants | {"PLACES": _PLACES, "SLOTS": _SLOTS}
    return append_fp8_kernel, constants | {
        "SCALES": config.scales,
        "SHARES": config.stored.inline_scales or 1,
        "TOKENS": _FP8_TOKENS_PER_PROGRAM,
    }


def append_warps(config: MlaConfig) -> int:
    """Return the warps of a program: FP8 takes twice as many for twice as many tokens."""
    return 8 if config.is_fp8 else 4
