"""What an attention function is given, by role."""

from __future__ import annotations

import torch

from paged_mla_adapters.judge.answers import shape_of
from paged_mla_adapters.judge.arguments import CacheArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.kernel import Call

WORKSPACE_BYTES = 128 << 20


class AttendArguments(CacheArguments):
    """Values of the roles in a call of an attention function.

    Parameters
    ----------
    call : Call
    claims : Claims
    """

    def __init__(self, call: Call, claims: Claims) -> None:
        super().__init__(call, claims)
        self._call = call

    @property
    def _rows(self) -> int:
        return len(self._call.seq_lens)

    def _queries(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._claims.query == "[T, H, D]":
            return tokens.contiguous()
        return tokens.reshape(self._rows, -1, *tokens.shape[1:]).contiguous()

    def _q(self) -> torch.Tensor:
        return self._queries(self._call.q)

    def _q_nope(self) -> torch.Tensor:
        return self._queries(self._call.q[..., : self._rank])

    def _q_pe(self) -> torch.Tensor:
        return self._queries(self._call.q[..., self._rank :])

    def _v_cache(self) -> torch.Tensor:
        keys: torch.Tensor = self.of("kv_cache")
        return keys[..., : self._rank]

    def _block_table(self) -> torch.Tensor:
        return self._call.block_table

    @property
    def _page(self) -> int:
        """Tokens that an entry of ``kv_indices`` stands for."""
        return 1 if self._claims.cache.startswith("[slots") else self._problem.block_size

    def _entries(self) -> torch.Tensor:
        """Return what each row's pages are, int32 [N, M'], of one token each in a flat cache."""
        return self._slots() if self._page == 1 else self._call.block_table

    def _slots(self) -> torch.Tensor:
        """Return the slots of each row's blocks, int32 [N, M * block_size]."""
        size, table = self._problem.block_size, self._call.block_table
        slots = table.long()[..., None] * size + torch.arange(size, device=table.device)
        return slots.flatten(1).int()

    def _pages(self) -> torch.Tensor:
        return -(-self._call.seq_lens // self._page)

    def _kv_indptr(self) -> torch.Tensor:
        return torch.nn.functional.pad(self._pages().cumsum(0), (1, 0)).int()

    def _kv_indices(self) -> torch.Tensor:
        entries = self._entries()
        number = torch.arange(entries.shape[1], device=entries.device)
        return entries[number < self._pages()[:, None]]

    def _kv_last_page_len(self) -> torch.Tensor:
        return self._call.seq_lens - (self._pages() - 1).clamp(min=0) * self._page

    def _req_to_token(self) -> torch.Tensor:
        return self._slots().flip(0).contiguous()

    def _request_ids(self) -> torch.Tensor:
        return torch.arange(self._rows, device=self._call.q.device, dtype=torch.int32).flip(0)

    def _seq_lens(self) -> torch.Tensor:
        return self._call.seq_lens

    def _prefix_lens(self) -> torch.Tensor:
        return (self._call.seq_lens - self._query_lens()).clamp(min=0)

    def _cu_seqlens_q(self) -> torch.Tensor:
        return self._call.cu_seqlens_q

    def _query_lens(self) -> torch.Tensor:
        return self._call.cu_seqlens_q.diff().int()

    def _max_query_len(self) -> int:
        return int(self._query_lens().max())

    def _max_seq_len(self) -> int:
        return int(self._call.seq_lens.max())

    def _softmax_scale(self) -> float:
        return self._problem.softmax_scale

    def _causal(self) -> bool:
        return self._problem.mask == "causal"

    def _num_heads(self) -> int:
        return self._call.q.shape[1]

    def _return_lse(self) -> bool:
        return True

    def _device(self) -> torch.device:
        return self._call.q.device

    def _workspace(self) -> torch.Tensor:
        return self._call.buffer("the workspace", (WORKSPACE_BYTES,), torch.uint8, fill=0xFF)

    def _out(self) -> torch.Tensor:
        shape = (*self._answer_shape(self._claims.out), self._rank)
        return self._call.buffer("the output", shape, self._call.q.dtype)

    def _lse(self) -> torch.Tensor:
        return self._call.buffer("the lse", self._answer_shape(self._claims.lse_layout))

    def _answer_shape(self, layout: str) -> tuple[int, ...]:
        tokens, heads = self._call.q.shape[:2]
        return shape_of(layout, tokens, heads, self._rows)
