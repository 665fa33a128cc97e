"""Kernels in plain torch, in the place of those that need a GPU.

``BatchMLAPagedAttentionWrapper`` has the interface that FlashInfer documents, and refuses what
FlashInfer's own planner refuses. ``fwd_kvcache_mla_fp8`` is called as FlashMLA's is.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial

import torch

from paged_mla_adapters import flashmla_fp8 as adapted
from paged_mla_adapters.declared import FEATURES, capabilities
from paged_mla_adapters.flashinfer import attend
from paged_mla_adapters.kernel import Call, KernelBackend


def flashinfer():
    """Return a backend with FlashInfer's interface, which takes any rows in one call."""
    kernel = partial(attend, sys.modules[__name__], "by hand", workspace_bytes=4096)
    return _backend(kernel, FEATURES | {"mixed"})


def uniform():
    """Return a backend that takes rows of one query length, as decode kernels do."""
    return _backend(_attend_rows, FEATURES, cache_formats=frozenset({"fp32", "fp8_e4m3"}))


def flashmla_fp8():
    """Return a backend with FlashMLA's FP8 interface: 8-bit queries with one scale for all."""
    kernel = adapted.of(sys.modules[__name__])
    return _backend(kernel, FEATURES, cache_formats=frozenset({"fp8_e4m3"}), products="fast")


def _backend(kernel, features, **more):
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
            **more,
        ),
    )


def _attend_rows(call: Call):
    q = call.q.unflatten(0, (len(call.seq_lens), -1))
    assert call.cu_seqlens_q.tolist() == list(range(0, len(call.q) + 1, q.shape[1]))
    is_fp8 = call.cache.dtype is torch.float8_e4m3fn
    out, lse = _attend_uniform(
        q,
        call.cache,
        call.seq_lens,
        call.block_table,
        call.problem.softmax_scale,
        cache_scale=call.problem.cache_scale if is_fp8 else 1.0,
        causal=call.problem.mask == "causal",
    )
    return out.flatten(0, 1)[..., : call.problem.dims.kv_lora_rank], lse.flatten(0, 1)


def _attend_uniform(q, cache, seq_lens, table, softmax_scale, *, cache_scale, causal):
    """Return the output of queries [N, q, H, D] over their rows, and the lse [N, q, H]."""
    out, lse = [], []
    for row, length in enumerate(seq_lens.tolist()):
        pages = table[row, : -(-length // cache.shape[1])]
        keys = cache[pages.long()].flatten(0, 1)[:length].float() * cache_scale
        answer = _softmax(q[row], keys, softmax_scale, causal=causal)
        out.append(answer[0])
        lse.append(answer[1])
    return torch.stack(out), torch.stack(lse)


def get_mla_decoding_metadata_dense_fp8(seq_lens, pairs, heads_k):
    assert heads_k == 1
    return seq_lens.clone(), torch.tensor(pairs)


def fwd_kvcache_mla_fp8(
    q, cache, rank, seq_lens, table, softmax_scale, is_causal, plan, pairs, descale_q, descale_k
):
    assert q.dtype is cache.dtype is torch.float8_e4m3fn
    assert cache.shape[2] == 1
    assert torch.equal(plan, seq_lens)
    assert pairs == q.shape[1] * q.shape[2]
    assert descale_q.shape == descale_k.shape == (1,)
    assert descale_q.dtype is descale_k.dtype is torch.float32
    out, lse = _attend_uniform(
        q.float() * descale_q,
        cache.squeeze(2),
        seq_lens,
        table,
        softmax_scale,
        cache_scale=descale_k,
        causal=is_causal,
    )
    return out[..., :rank], lse.transpose(1, 2)


def _softmax(q, keys, scale, *, causal):
    """Return the output of queries [q, H, D] over keys [s, D], and the natural lse [q, H]."""
    scores = scale * torch.einsum("qhd,sd->qhs", q, keys)
    if causal:
        after = torch.ones(len(q), len(keys)).triu(len(keys) - len(q) + 1).bool()
        scores = scores.masked_fill(after[:, None], -torch.inf)
    lse = torch.logsumexp(scores, -1)
    sees = (lse > -torch.inf) | lse.isnan()  # a query that sees at least one key, also a NaN
    weights = torch.where(sees[..., None], torch.exp(scores - lse[..., None]), 0.0)
    # Some CPUs add the products of a float32 matrix product one after the other, which is inexact.
    return (weights.double() @ keys.double()).float(), lse


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
