"""Launch the quantization of a step's queries to e4m3 (rule S-11)."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.architectures import OVERLAPPING, ROUNDING_E4M3_ONCE
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.quantize import quantize_kernel
from paged_mla_optimized.operations.argument_types import rope_pointer
from paged_mla_optimized.runtime.kernel_spec import KernelSpec, number, overlap_options, pointer
from paged_mla_optimized.runtime.launch import Launcher

_PAIRS_PER_PROGRAM = 4


class Quantize:
    """The quantization launch of one :class:`PagedMla`.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        A name as in ``planning/families.py``.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2], empty without a rope.
    """

    def __init__(
        self, config: MlaConfig, arch: str, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.config = config
        self.tables = tables
        self._kernels = [
            Launcher(quantize_spec(config, arch, is_given=given)) for given in (False, True)
        ]

    def launch(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        codes: torch.Tensor,
        scales: torch.Tensor,
        *,
        positions: torch.Tensor | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Write the first T lines of dense `codes` and `scales`; T > 0.

        `positions` are only read with a rope. `scale` is one scale for all queries.
        """
        of_q_nope, of_q_pe = q_nope.stride(), q_pe.stride()
        num_pairs = len(q_nope) * self.config.num_heads
        unread = scales
        given = unread if scale is None else scale
        positions = unread if positions is None else positions
        self._kernels[scale is not None](
            (-(-num_pairs // _PAIRS_PER_PROGRAM), 1, 1),
            (of_q_nope, of_q_pe),
            *(q_nope, q_pe, codes, scales, given, positions, *self.tables),
            *(*of_q_nope[:2], *of_q_pe[:2], num_pairs, self.config.num_heads),
        )


class QuantizeQueries:
    """The quantization of queries for attend kernels of FP8 products, with its output buffers.

    Parameters
    ----------
    config : MlaConfig
    arch : str
        A name as in ``planning/families.py``.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2] on the device, empty without a rope.

    Attributes
    ----------
    codes : uint8 [max_query_tokens, H, R + P]
        The first T lines are the e4m3 codes of the last step's queries.
    scales : float32 [max_query_tokens, H]
        The factor of the codes of each pair; > 0 and finite.
    """

    def __init__(
        self, config: MlaConfig, arch: str, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        device = tables[0].device
        shape = (config.max_query_tokens, config.num_heads)
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.codes = torch.empty((*shape, width), dtype=torch.uint8, device=device)
        self.scales = torch.empty(shape, dtype=torch.float32, device=device)
        self._quantize = Quantize(config, arch, tables)

    def launch(
        self, q_nope: torch.Tensor, q_pe: torch.Tensor, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write and return :attr:`codes` and :attr:`scales`, in their first T lines; T > 0.

        `positions` are only read with a rope. Elements that are infinite or NaN get the code of
        NaN.
        """
        self._quantize.launch(q_nope, q_pe, self.codes, self.scales, positions=positions)
        return self.codes, self.scales


def quantize_spec(config: MlaConfig, arch: str, *, is_given: bool) -> KernelSpec:
    """Return the kernel that quantizes queries, with scales from the data or a passed scale."""
    query, table = pointer(config.dtype), rope_pointer(config)
    types = {
        "q_nope_ptr": query,
        "q_pe_ptr": query,
        "codes_ptr": "*u8",
        "q_scale_ptr": "*fp32",
        "given_scale_ptr": "*fp32",
        "positions_ptr": "*i64",
        "cos_ptr": table,
        "sin_ptr": table,
        "num_heads": number(config.num_heads),
    }
    constants = {
        "R": config.kv_lora_rank,
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
        "IS_GIVEN": is_given,
        "PAIRS": _PAIRS_PER_PROGRAM,
        "NATIVE": arch in ROUNDING_E4M3_ONCE,
        "OVERLAP": arch in OVERLAPPING,
    }
    return KernelSpec(quantize_kernel, constants, types, overlap_options(arch in OVERLAPPING))
