"""The arguments of an attention function, by role."""

from __future__ import annotations

from functools import cached_property

import torch

from paged_mla_adapters.call import Call, PageLists
from paged_mla_adapters.judge.answers import shape_of
from paged_mla_adapters.judge.arguments import CacheArguments
from paged_mla_adapters.judge.claims import Claims

SPLITS = 4  # the number of splits of a row's keys, for functions that take this number


class AttendArguments(CacheArguments):
    """The values of the roles in a call of an attention function.

    Parameters
    ----------
    call : Call
    claims : Claims
    """

    def __init__(self, call: Call, claims: Claims) -> None:
        super().__init__(call, claims)
        self._call = call

    def _queries(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens if self._claims.query == "[T, H, D]" else self._call.by_rows(tokens)

    def _q(self) -> torch.Tensor:
        return self._queries(self._call.q)

    def _q_nope(self) -> torch.Tensor:
        return self._queries(self._call.query_parts[0])

    def _q_pe(self) -> torch.Tensor:
        return self._queries(self._call.query_parts[1])

    def _v_cache(self) -> torch.Tensor:
        keys: torch.Tensor = self.of("kv_cache")
        return keys[..., : self._rank]

    def _block_table(self) -> torch.Tensor:
        return self._call.block_table

    @property
    def _page(self) -> int:
        """The number of tokens in a page, to which an entry of ``kv_indices`` points."""
        is_flat = self._claims.cache.startswith("[slots")
        return 1 if is_flat or not self._claims.knows_lengths else self._problem.block_size

    @cached_property
    def _lists(self) -> PageLists:
        """The pages of the rows, with :attr:`_page` tokens each."""
        return self._call.page_lists(self._page)

    def _kv_indptr(self) -> torch.Tensor:
        return self._lists.indptr

    def _kv_indices(self) -> torch.Tensor:
        return self._lists.indices

    def _kv_last_page_len(self) -> torch.Tensor:
        return self._lists.last_page_len

    def _req_to_token(self) -> torch.Tensor:
        by_ids = "request_ids" in self._claims.roles.values()
        return self._call.slots.flip(0).contiguous() if by_ids else self._call.slots

    def _request_ids(self) -> torch.Tensor:
        rows = len(self._call.seq_lens)
        return torch.arange(rows, device=self._call.q.device, dtype=torch.int32).flip(0)

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

    def _num_rows(self) -> int:
        return len(self._call.seq_lens)

    def _max_seq_len(self) -> int:
        return int(self._call.seq_lens.max())

    def _softmax_scale(self) -> float:
        return self._problem.softmax_scale

    def _causal(self) -> bool:
        return self._problem.mask == "causal"

    def _num_heads(self) -> int:
        return self._call.q.shape[1]

    def _num_kv_heads(self) -> int:
        return 1

    def _head_dim(self) -> int:
        return self._call.q.shape[-1]

    def _return_lse(self) -> bool:
        return True

    def _device(self) -> torch.device:
        return self._call.q.device

    def _workspace(self) -> torch.Tensor:
        return self._call.workspace()

    def _attn_logits(self) -> torch.Tensor:
        """Return a buffer for the output of each split.

        The lse of a split follows its output unless another parameter has the role ``attn_lse``.
        """
        behind = "attn_lse" not in self._claims.roles.values()
        shape = (*self._call.q.shape[:2], SPLITS, self._rank + behind)
        return self._call.buffer("the splits' results", shape)

    def _attn_lse(self) -> torch.Tensor:
        return self._call.buffer("the splits' lse", (*self._call.q.shape[:2], SPLITS))

    def _num_kv_splits(self) -> int | torch.Tensor:
        """Return the number of splits: a tensor with one number for each row, or one number.

        It is a tensor if another parameter has the role ``max_kv_splits``.
        """
        if "max_kv_splits" not in self._claims.roles.values():
            return SPLITS
        return torch.full_like(self._call.seq_lens, SPLITS)

    def _max_kv_splits(self) -> int:
        return SPLITS

    def _out(self) -> torch.Tensor:
        shape = (*self._answer_shape(self._claims.out), self._rank)
        return self._call.buffer("the output", shape, self._call.q.dtype)

    def _lse(self) -> torch.Tensor:
        return self._call.buffer("the lse", self._answer_shape(self._claims.lse_layout))

    def _answer_shape(self, layout: str) -> tuple[int, ...]:
        tokens, heads = self._call.q.shape[:2]
        return shape_of(layout, tokens, heads, len(self._call.seq_lens))
