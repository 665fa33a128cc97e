"""The plan of one step: every buffer the kernels share, filled on the device."""

from __future__ import annotations

from typing import Any

import torch
import triton

from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.kernels.plan import schedule_kernel, token_kernel
from paged_mla_optimized.tables import RequestMap
from paged_mla_optimized.variants import AttendVariant

_TOKENS_PER_PROGRAM = 64
_ENTRIES_PER_PROGRAM = 512


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
    key_starts : int32 [max_rows + 2]
        Prefix sums of ``row_lens``, from 0.
    unit_starts : int64 [max_rows + 2]
        Prefix sums of the rows' work, see ``kernels/schedule.py``.
    mask_starts : int64 [max_rows + 1]
        First element of a row's tree matrix.
    positions, slot_mapping : int64 [max_query_tokens]
        Rules S-3 and S-1.
    tree_words : int32 [max_query_tokens, tree_words]
        The draft tree, 32 nodes a word, whatever its spelling was.
    table : int32 [max_rows, table_width]
        Built from a request map; empty if the config asks for none.
    block_table : int32 [B, M]
        The caller's tensor, by reference, or rows of `table`.
    num_rows, num_tokens : int
        B and T of the planned step.
    """

    BUFFERS = (
        "token_starts", "row_lens", "key_starts", "unit_starts", "mask_starts", "positions",
        "slot_mapping", "tree_words", "table",
    )  # fmt: skip

    def __init__(self, config: MlaConfig, variant: AttendVariant, device: torch.device) -> None:
        self.config = config
        self.variant = variant

        def buffer(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        rows, tokens = config.max_rows, config.max_query_tokens
        self.token_starts = buffer(rows + 2, dtype=torch.int32)
        self.row_lens = buffer(rows + 1, dtype=torch.int32)
        self.key_starts = buffer(rows + 2, dtype=torch.int32)
        self.unit_starts = buffer(rows + 2, dtype=torch.int64)
        self.mask_starts = buffer(rows + 1, dtype=torch.int64)
        self.positions = buffer(tokens, dtype=torch.int64)
        self.slot_mapping = buffer(tokens, dtype=torch.int64)
        self.tree_words = buffer(tokens, max(config.tree_words, 1), dtype=torch.int32)
        self.table = buffer(
            rows if config.table_width else 0, config.table_width, dtype=torch.int32
        )
        self.block_table = self.table[:0]
        self.num_rows = 0
        self.num_tokens = 0
        self._schedule_constants = schedule_constants(config, variant)
        self._token_constants = token_constants(config)

    def fill(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
        num_tokens: int,
        mask: torch.Tensor | None,
    ) -> None:
        """Rewrite every buffer for a step, in two launches and without synchronising."""
        self.num_rows = seq_lens.shape[0]
        self.num_tokens = num_tokens
        self._schedule(cu_seqlens_q, seq_lens, block_table)
        if num_tokens > 0:
            self._describe_tokens(mask)

    def _schedule(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | RequestMap,
    ) -> None:
        config = self.config
        if isinstance(block_table, RequestMap):
            slots, ids = block_table.req_to_token, block_table.request_ids
            self.block_table = self.table[: self.num_rows]
            builders = self.num_rows * triton.cdiv(config.table_width, _ENTRIES_PER_PROGRAM)
        else:
            slots, ids = self.table, self.row_lens  # stand-ins, never read
            self.block_table = block_table
            builders = 0
        schedule_kernel[(1 + builders,)](
            cu_seqlens_q,
            seq_lens,
            slots,
            ids,
            self.token_starts,
            self.row_lens,
            self.key_starts,
            self.unit_starts,
            self.mask_starts,
            self.table,
            cu_seqlens_q.stride(0),
            seq_lens.stride(0),
            *slots.stride(),
            ids.stride(0),
            self.num_rows,
            self.num_tokens,
            config.num_heads,
            config.block_size,
            config.table_width,
            config.table_fill,
            **self._schedule_constants,
        )

    def _describe_tokens(self, mask: torch.Tensor | None) -> None:
        block_table = self.block_table
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
            self.config.block_size,
            **self._token_constants,
        )


def schedule_constants(config: MlaConfig, variant: AttendVariant) -> dict[str, Any]:
    """Return what ``schedule_kernel`` is specialised for."""
    return {
        "MASK": config.mask,
        "GROUP_M": variant.group_m,
        "TILE_N": variant.tile_n,
        "ROWS": triton.next_power_of_2(config.max_rows + 2),
        "ENTRIES": _ENTRIES_PER_PROGRAM,
    }


def token_constants(config: MlaConfig) -> dict[str, Any]:
    """Return what ``token_kernel`` is specialised for."""
    return {
        "MASK": config.mask,
        "TREE_WORDS": config.tree_words,
        "SEARCH_STEPS": config.search_steps,
        "TOKENS": _TOKENS_PER_PROGRAM,
    }
