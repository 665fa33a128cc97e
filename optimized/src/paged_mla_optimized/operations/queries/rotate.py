"""Launch the rotation of a step's queries, for kernels that do not rotate them."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.architectures import OVERLAPPING
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.rope import rotate_kernel
from paged_mla_optimized.operations.argument_types import rope_pointer
from paged_mla_optimized.runtime.kernel_spec import KernelSpec, number, overlap_options, pointer
from paged_mla_optimized.runtime.launch import Launcher

_PAIRS_PER_PROGRAM = 16


class RotateQueries:
    """The rotation launch of one :class:`PagedMla`, and its output buffer.

    Parameters
    ----------
    config : MlaConfig
        A config with a rope.
    arch : str
        A name as in ``planning/families.py``.
    tables : (cos, sin)
        Rotation tables [max_model_len, P / 2].

    Attributes
    ----------
    q_pe : dtype [max_query_tokens, H, P]
        The first T lines are the rotated queries of the last step.
    """

    def __init__(
        self, config: MlaConfig, arch: str, tables: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        self.config = config
        self.tables = tables
        shape = (config.max_query_tokens, config.num_heads, config.qk_rope_head_dim)
        self.q_pe = torch.empty(shape, dtype=config.dtype, device=tables[0].device)
        self._kernel = Launcher(rotate_spec(config, arch))

    def launch(self, q_pe: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotate `q_pe` [T, H, P] into the first T lines of :attr:`q_pe`; return the buffer; T > 0.

        The position of a padded token is 0, and no kernel reads its line.
        """
        num_pairs = len(q_pe) * self.config.num_heads
        strides = q_pe.stride()
        self._kernel(
            (-(-num_pairs // _PAIRS_PER_PROGRAM), 1, 1),
            strides,
            *(q_pe, self.q_pe, positions, *self.tables),
            *(*strides[:2], num_pairs, self.config.num_heads),
        )
        return self.q_pe


def rotate_spec(config: MlaConfig, arch: str) -> KernelSpec:
    """Return the kernel that rotates queries."""
    query, table = pointer(config.dtype), rope_pointer(config)
    types = {
        "q_pe_ptr": query,
        "rotated_ptr": query,
        "positions_ptr": "*i64",
        "cos_ptr": table,
        "sin_ptr": table,
        "num_heads": number(config.num_heads),
    }
    constants = {
        "P": config.qk_rope_head_dim,
        "ROPE": config.rope_pairing,
        "PAIRS": _PAIRS_PER_PROGRAM,
        "OVERLAP": arch in OVERLAPPING,
    }
    return KernelSpec(rotate_kernel, constants, types, overlap_options(arch in OVERLAPPING))
