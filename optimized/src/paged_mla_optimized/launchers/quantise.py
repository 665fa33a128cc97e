"""Launches the quantisation of a step's queries, for kernels of FP8 products."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.common.quantise import quantise_kernel
from paged_mla_optimized.planning.families import OVERLAPPING, WITH_E4M3
from paged_mla_optimized.runtime.launch import Launcher, overlap_options

_PAIRS_PER_PROGRAM = 4


class QuantiseQueries:
    """The quantisation launch of one :class:`PagedMla`, and the buffers that attend kernels read.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        As ``planning/families.py`` names it.
    device : torch.device

    Attributes
    ----------
    codes : uint8 [max_query_tokens, H, R + P]
        e4m3 codes of the last step's queries in the first T lines.
    scales : float32 [max_query_tokens, H]
        What each pair's codes are multiplied by; > 0 and finite.
    """

    def __init__(self, config: MlaConfig, arch: str, device: torch.device) -> None:
        self.config = config
        shape = (config.max_query_tokens, config.num_heads)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.codes = torch.empty((*shape, width), dtype=torch.uint8, device=device)
        self.scales = torch.empty(shape, dtype=torch.float32, device=device)
        constants = quantise_constants(config, arch)
        self._kernel = Launcher(quantise_kernel, constants, **overlap_options(constants))

    def launch(self, q_nope: torch.Tensor, q_pe: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the first T lines of :attr:`codes` and :attr:`scales`; return those; T > 0.

        `q_pe` is rotated. A query that holds an infinite number or NaN has the code of NaN there.
        """
        of_q_nope, of_q_pe = q_nope.stride(), q_pe.stride()
        num_pairs = len(q_nope) * self.config.num_heads
        self._kernel(
            (triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM), 1, 1),
            (of_q_nope, of_q_pe),
            (q_nope, q_pe, self.codes, self.scales),
            (*of_q_nope[:2], *of_q_pe[:2], num_pairs, self.config.num_heads),
        )
        return self.codes, self.scales


def quantise_constants(config: MlaConfig, arch: str) -> dict[str, Any]:
    """Return what ``quantise_kernel`` is specialised for."""
    return {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "PAIRS": _PAIRS_PER_PROGRAM,
        "NATIVE": arch in WITH_E4M3,
        "OVERLAP": arch in OVERLAPPING,
    }
