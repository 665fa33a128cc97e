"""Kernels in plain torch, in the place of those that need a GPU.

``BatchMLAPagedAttentionWrapper`` has the interface that FlashInfer documents, and refuses what
FlashInfer's own planner refuses.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch

from paged_mla_adapters.declared import FEATURES, capabilities
from paged_mla_adapters.flashinfer import attend
from paged_mla_adapters.kernel import Call, KernelBackend


def flashinfer():
    """Return FlashInfer's interface as a backend: any rows in one call."""
    return _backend(partial(attend, sys.modules[__name__], "by hand"), FEATURES | {"mixed"})


def uniform():
    """Return a backend that takes rows of one length, as decode kernels do."""
    return _backend(_attend_rows, FEATURES)


def _backend(kernel, features):
    return KernelBackend(
        name="by-hand",
        version="0",
        kernel=kernel,
        capabilities=capabilities(
            frozenset({"float32"}),
            head_dims=((32, 16),),
            masks=("causal", "non_causal"),
            features=features,
            max_query_len=1 << 20,
        ),
    )


def _attend_rows(call: Call):
    rows = len(call.seq_lens)
    q = call.q.unflatten(0, (rows, -1))
    assert call.cu_seqlens_q.tolist() == list(range(0, len(call.q) + 1, q.shape[1]))
    out, lse = [], []
    for row, length in enumerate(call.seq_lens.tolist()):
        pages = call.block_table[row, : -(-length // call.problem.block_size)]
        keys = call.cache[pages.long()].flatten(0, 1)[:length]
        causal = call.problem.mask == "causal"
        answer = _softmax(q[row], keys, call.problem.softmax_scale, causal=causal)
        out.append(answer[0])
        lse.append(answer[1])
    return torch.cat(out)[..., : call.problem.dims.kv_lora_rank], torch.cat(lse)


def _softmax(q, keys, scale, *, causal):
    """Return what q [q, H, D] gets of keys [s, D], and its natural lse [q, H]."""
    scores = scale * torch.einsum("qhd,sd->qhs", q, keys)
    if causal:
        after = torch.ones(len(q), len(keys)).triu(len(keys) - len(q) + 1).bool()
        scores = scores.masked_fill(after[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    return torch.exp(scores - lse[..., None]).nan_to_num() @ keys, lse


@dataclass
class MLAPlanMetadata:
    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    kv_len_arr: torch.Tensor

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


class BatchMLAPagedAttentionWrapper:
    def __init__(self, float_workspace_buffer, *, backend):
        assert float_workspace_buffer.view(torch.float32)[:9].isnan().all()
        assert backend == "by hand"

    def plan(self, *, metadata, page_size, head_dim_ckv, head_dim_kpe, lse_mode, **rest):
        tensors = vars(metadata).values()
        assert all(t.dtype is torch.int32 and t.ndim == 1 and t.is_contiguous() for t in tensors)
        pages = -(-metadata.kv_len_arr // page_size)
        assert torch.equal(metadata.kv_indptr.diff(), pages)
        assert len(metadata.kv_indices) == metadata.kv_indptr[-1]
        assert len(metadata.qo_indptr) == len(metadata.kv_indptr) == len(metadata.kv_len_arr) + 1
        assert lse_mode == "base2"
        self.metadata, self.rest = metadata, rest
        self.sizes = page_size, head_dim_ckv, head_dim_kpe

    def run(self, *, query, kv_cache, out, lse, return_lse):
        page_size, rank, rope = self.sizes
        assert return_lse
        assert query.shape[1:] == (self.rest["num_heads"], rank + rope)
        assert kv_cache.shape[1:] == (page_size, rank + rope)
        assert query.dtype == self.rest["q_data_type"] == self.rest["kv_data_type"]
        of, starts = self.metadata.qo_indptr, self.metadata.kv_indptr
        for row, length in enumerate(self.metadata.kv_len_arr.tolist()):
            tokens = slice(of[row], of[row + 1])
            pages = self.metadata.kv_indices[starts[row] : starts[row + 1]]
            keys = kv_cache[pages.long()].flatten(0, 1)[:length]
            causal = self.rest["causal"]
            found, natural = _softmax(query[tokens], keys, self.rest["sm_scale"], causal=causal)
            out[tokens], lse[tokens] = found[..., :rank], natural / torch.log(torch.tensor(2.0))
