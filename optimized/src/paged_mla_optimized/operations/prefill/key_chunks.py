"""Launch the kernel that chooses one chunk of a step's keys."""

from __future__ import annotations

import torch
import triton

from paged_mla_optimized.kernels.common.key_chunks import key_chunk_kernel
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec
from paged_mla_optimized.runtime.launch import Launcher

_ALIGNED = 4  # entries of 16 bytes; kernels expect buffers to begin at multiples of 16 bytes


class KeyChunk:
    """Launcher of ``key_chunk_kernel``, with the buffers that the kernel fills.

    Parameters
    ----------
    max_rows : int
    room : int
        The lines of the workspace, one for each key.
    device : torch.device
    """

    def __init__(self, max_rows: int, room: int, device: torch.device) -> None:
        self._room = room
        width = -(-(max_rows + 1) // _ALIGNED) * _ALIGNED
        self.buffer = torch.zeros((3, width), dtype=torch.int32, device=device)
        self._buffers = self.buffer.unbind()
        self.num_rows = 0
        self._kernel = Launcher(key_chunk_spec(max_rows))

    @property
    def query_starts(self) -> torch.Tensor:
        """Prefix sums of the rows' query lengths, from 0, int32 [B + 1]."""
        return self._buffers[0][: self.num_rows + 1]

    @property
    def key_starts(self) -> torch.Tensor:
        """Prefix sums of the rows' keys in this chunk, int32 [B + 1]."""
        return self._buffers[1][: self.num_rows + 1]

    @property
    def first_tokens(self) -> torch.Tensor:
        """The first key of each row in this chunk, int32 [B]."""
        return self._buffers[2][: self.num_rows]

    def fill(
        self, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor, part: int, lines: int
    ) -> None:
        """Describe chunk number `part`, of at most `lines` keys, with one kernel launch."""
        self.num_rows = seq_lens.shape[0]
        strides = (*cu_seqlens_q.stride(), *seq_lens.stride())
        self._kernel(
            (1, 1, 1),
            strides,
            *(cu_seqlens_q, seq_lens, *self._buffers),
            *(*strides, self.num_rows, part, self._room, lines),
        )


def key_chunk_spec(max_rows: int) -> KernelSpec:
    """Return the kernel that chooses a chunk."""
    types = {
        "cu_seqlens_q_ptr": "*i32",
        "seq_lens_ptr": "*i32",
        "query_starts_ptr": "*i32",
        "key_starts_ptr": "*i32",
        "first_tokens_ptr": "*i32",
        "stride_cu_q": DENSE,
        "stride_lens": DENSE,
    }
    return KernelSpec(key_chunk_kernel, {"ROWS": triton.next_power_of_2(max_rows + 1)}, types)
