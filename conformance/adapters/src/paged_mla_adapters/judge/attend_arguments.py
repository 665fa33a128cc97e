"""What an attention function is given, by role."""

from __future__ import annotations

import itertools

import torch

from paged_mla_adapters.judge.answers import shape_of
from paged_mla_adapters.judge.arguments import Arguments, cache_view
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.kernel import Call

WORKSPACE_BYTES = 128 << 20


class AttendArguments(Arguments):
    """Values of the roles in a call of an attention function.

    Parameters
    ----------
    call : Call
    claims : Claims
    """

    def __init__(self, call: Call, claims: Claims) -> None:
        super().__init__()
        self._call, self._claims = call, claims
        self._rank = call.problem.dims.kv_lora_rank

    @property
    def _rows(self) -> int:
        return len(self._call.seq_lens)

    @property
    def _query_lens_on_host(self) -> list[int]:
        starts = self._call.cu_seqlens_q.tolist()
        return [stop - start for start, stop in itertools.pairwise(starts)]

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

    def _laid_out(self, cache: torch.Tensor) -> torch.Tensor:
        return cache_view(cache, self._claims.cache)

    def _kv_cache(self) -> torch.Tensor:
        return self._laid_out(self._call.cache)

    def _v_cache(self) -> torch.Tensor:
        keys: torch.Tensor = self.of("kv_cache")
        return keys[..., : self._rank]

    def _ckv_cache(self) -> torch.Tensor:
        return self._laid_out(self._call.cache[..., : self._rank].contiguous())

    def _kpe_cache(self) -> torch.Tensor:
        return self._laid_out(self._call.cache[..., self._rank :].contiguous())

    def _block_table(self) -> torch.Tensor:
        return self._call.block_table

    @property
    def _page(self) -> int:
        """Tokens that an entry of ``kv_indices`` stands for."""
        return 1 if self._claims.cache.startswith("[slots") else self._call.problem.block_size

    def _entries(self) -> torch.Tensor:
        """Return what each row's pages are, int32 [N, M'], of one token each in a flat cache."""
        size, table = self._call.problem.block_size, self._call.block_table
        if self._page == size:
            return table
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
        size, table = self._call.problem.block_size, self._call.block_table
        slots = table.long()[..., None] * size + torch.arange(size, device=table.device)
        return slots.flatten(1).int().flip(0).contiguous()

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
        return max(self._query_lens_on_host)

    def _max_seq_len(self) -> int:
        return int(self._call.seq_lens.max())

    def _softmax_scale(self) -> float:
        return self._call.problem.softmax_scale

    def _causal(self) -> bool:
        return self._call.problem.mask == "causal"

    def _kv_lora_rank(self) -> int:
        return self._rank

    def _qk_rope_head_dim(self) -> int:
        return self._call.problem.dims.qk_rope_head_dim

    def _block_size(self) -> int:
        return self._call.problem.block_size

    def _num_heads(self) -> int:
        return self._call.q.shape[1]

    def _k_scale(self) -> float:
        return self._call.problem.cache_scale if self._call.cache.element_size() == 1 else 1.0

    _v_scale = _k_scale

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
