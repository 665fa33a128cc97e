"""Launch the kernel that computes the step of one rank from the step of its group (rule S-18)."""

from __future__ import annotations

import torch
import triton

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.shard import shard_kernel
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec, number
from paged_mla_optimized.runtime.launch import Launcher

_ENTRIES = 512


class Shard:
    """The kernel launch, and the buffers that it fills: every query token becomes a separate row.

    Parameters
    ----------
    config : MlaConfig
        The config of the group; ``block_size`` counts the tokens of a block on one rank.
    world, rank, interleave : int
    table_width : int
        Maximum number of blocks of a row.
    device : torch.device

    Attributes
    ----------
    cu_seqlens_q : int32 [max_query_tokens + 1]
        0, 1, 2 and so on, since each row has one query.
    local_lens : int32 [max_query_tokens]
        Number of this rank's keys that each query sees; 0 for padding.
    positions : int64 [max_query_tokens]
        Positions in the row of the group; 0 for padding.
    slot_mapping : int64 [max_query_tokens]
        Slots on this rank; -1 for tokens of other ranks, and for padding.
    block_table : int32 [max_query_tokens, table_width]
        For each token, the blocks with keys that it sees; later entries are not written.
    """

    def __init__(
        self,
        config: MlaConfig,
        *,
        world: int,
        rank: int,
        interleave: int,
        table_width: int,
        device: torch.device,
    ) -> None:
        tokens = config.max_query_tokens
        self._numbers = (rank, config.block_size, table_width)
        self._block_tokens = config.block_size * world  # tokens of a block on all ranks together
        self._max_model_len = config.max_model_len
        self._kernel = Launcher(shard_spec(config, world, interleave))
        self.cu_seqlens_q = torch.arange(tokens + 1, dtype=torch.int32, device=device)
        self.local_lens = torch.zeros(tokens, dtype=torch.int32, device=device)
        self.positions = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.slot_mapping = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.block_table = torch.zeros((tokens, table_width), dtype=torch.int32, device=device)

    def launch(
        self,
        cu_seqlens_q: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_tokens: int,
    ) -> None:
        """Fill the buffers for a step; `num_tokens` > 0."""
        strides = (cu_seqlens_q.stride(0), seq_lens.stride(0), *block_table.stride())
        longest = min(self._max_model_len, block_table.shape[1] * self._block_tokens)
        self._kernel(
            (num_tokens, 1, 1),
            strides,
            cu_seqlens_q,
            seq_lens,
            block_table,
            self.local_lens,
            self.positions,
            self.slot_mapping,
            self.block_table,
            *(*strides, len(seq_lens), *self._numbers, longest),
        )


def shard_spec(config: MlaConfig, world: int, interleave: int) -> KernelSpec:
    """Return the kernel that computes a rank's step."""
    types = {
        "cu_seqlens_q_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "block_table_ptr": "*i32",
        "local_lens_ptr": "*i32",
        "positions_ptr": "*i64",
        "slot_mapping_ptr": "*i64",
        "table_ptr": "*i32",
        "stride_cu": DENSE,
        "stride_lens": DENSE,
        "stride_table_col": DENSE,
        "block_size": number(config.block_size),
    }
    constants = {
        "WORLD": world,
        "INTERLEAVE": interleave,
        "ROWS": triton.next_power_of_2(config.max_rows),
        "ENTRIES": _ENTRIES,
    }
    return KernelSpec(shard_kernel, constants, types)
