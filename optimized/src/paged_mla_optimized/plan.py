"""The plan of one step: every buffer the kernels share, filled on the device."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.plan import schedule_kernel, token_kernel
from paged_mla_optimized.variants import AttendVariant

_TOKENS_PER_PROGRAM = 64


class Plan:
    """Device buffers that describe a step; allocated once, rewritten by :meth:`fill`.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
        Tile sizes the schedule counts in.
    device : torch.device

    Attributes
    ----------
    token_starts : int32 [max_rows + 2]
        First token of each row, of the padded tokens, and T.
    row_lens : int32 [max_rows + 1]
        ``seq_lens``, then 0 for the padded tokens.
    unit_starts : int64 [max_rows + 2]
        Prefix sums of the rows' work, see ``kernels/schedule.py``.
    positions, slot_mapping : int64 [max_query_tokens]
        Rules S-3 and S-1.
    tree_words : int32 [max_query_tokens, tree_words]
        The draft tree, 32 nodes a word, whatever its spelling was.
    block_table : int32 [B, M]
        The caller's tensor, by reference.
    num_rows, num_tokens : int
        B and T of the planned step.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, device: torch.device) -> None:
        self.config = config
        self.variant = variant

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, tokens = config.max_rows, config.max_query_tokens
        self.token_starts = buffer(rows + 2, dtype=torch.int32)
        self.row_lens = buffer(rows + 1, dtype=torch.int32)
        self.unit_starts = buffer(rows + 2, dtype=torch.int64)
        self.mask_starts = buffer(rows + 1, dtype=torch.int64)
        self.positions = buffer(tokens, dtype=torch.int64)
        self.slot_mapping = buffer(tokens, dtype=torch.int64)
        self.tree_words = buffer(tokens, max(config.tree_words, 1), dtype=torch.int32)
        self.block_table = buffer(0, 0, dtype=torch.int32)
        self.num_rows = 0
        self.num_tokens = 0

    def fill(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_tokens: int,
        mask: torch.Tensor | None,
    ) -> None:
        """Rewrite every buffer for a step, in two launches and without synchronising."""
        self.num_rows = seq_lens.shape[0]
        self.num_tokens = num_tokens
        self.block_table = block_table
        if num_tokens > 0:
            self._schedule(cu_seqlens_q, seq_lens)
            self._describe_tokens(mask)

    def _schedule(self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor) -> None:
        config, variant = self.config, self.variant
        schedule_kernel[(1,)](
            cu_seqlens_q,
            seq_lens,
            self.token_starts,
            self.row_lens,
            self.unit_starts,
            self.mask_starts,
            cu_seqlens_q.stride(0),
            seq_lens.stride(0),
            self.num_rows,
            self.num_tokens,
            config.num_heads,
            **schedule_constants(config, variant),
        )

    def _describe_tokens(self, mask: torch.Tensor | None) -> None:
        config, block_table = self.config, self.block_table
        # Without a tree no mask is read; any tensor stands in for it.
        words = self.tree_words if mask is None else mask.view(torch.uint8)
        token_kernel[(triton.cdiv(self.num_tokens, _TOKENS_PER_PROGRAM),)](
            self.token_starts,
            self.row_lens,
            self.mask_starts,
            block_table,
            words,
            self.positions,
            self.slot_mapping,
            self.tree_words,
            block_table.stride(0),
            block_table.stride(1),
            words.stride(0),
            words.stride(-1),
            self.num_rows,
            self.num_tokens,
            config.block_size,
            **token_constants(config),
        )


def schedule_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what ``schedule_kernel`` is specialised for."""
    return {
        "MASK": config.mask,
        "GROUP_M": variant.tile_m * variant.lanes,
        "TILE_N": variant.tile_n,
        "ROWS": triton.next_power_of_2(config.max_rows + 2),
    }


def token_constants(config: MlaConfig) -> dict[str, Any]:
    """Return what ``token_kernel`` is specialised for."""
    return {
        "MASK": config.mask,
        "TREE_WORDS": config.tree_words,
        "SEARCH_STEPS": config.search_steps,
        "TOKENS": _TOKENS_PER_PROGRAM,
    }
