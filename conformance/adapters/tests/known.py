"""Right functions in torch with known signatures, for ``paged-mla judge --like``."""
# ruff: noqa: ARG001, FBT002  # parameters are those of other projects

from __future__ import annotations

from dataclasses import dataclass

import judged
import torch

LARGEST = 448.0


def _answer(q, cache, starts, table, lens, scale, causal, rank):
    out, lse = judged.ragged(q, cache, starts, table, lens, scale, causal)
    return out[..., :rank].to(torch.bfloat16 if q.element_size() == 1 else q.dtype), lse


def flash_attn_varlen_func(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    q_v=None,
    dropout_p=0.0,
    softmax_scale=None,
    causal=False,
    block_table=None,
    return_softmax_lse=False,
    fa_version=2,
):
    """Have the signature of vLLM's FlashAttention 3: latents as values, and an lse [H, T]."""
    assert fa_version == 3
    assert return_softmax_lse
    assert max_seqlen_q == cu_seqlens_q.diff().max()
    assert max_seqlen_k == seqused_k.max()
    queries, keys = torch.cat([q_v, q], -1), torch.cat([v, k], -1).squeeze(2)
    given = cu_seqlens_q, block_table, seqused_k, softmax_scale, causal
    out, lse = _answer(queries, keys, *given, v.shape[-1])
    return out, lse.T.contiguous()


def flash_attn_with_kvcache(
    q,
    k_cache,
    v_cache,
    k=None,
    v=None,
    qv=None,
    cache_seqlens=None,
    page_table=None,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale=None,
    causal=False,
    return_softmax_lse=False,
):
    """Have the signature of the package ``flash-attn-3``."""
    return flash_attn_varlen_func(
        q,
        k_cache,
        v_cache,
        max_seqlen_q,
        cu_seqlens_q,
        int(cache_seqlens.max()),
        seqused_k=cache_seqlens,
        q_v=qv,
        softmax_scale=softmax_scale,
        causal=causal,
        block_table=page_table,
        return_softmax_lse=return_softmax_lse,
        fa_version=3,
    )


def mla_decode_fwd(
    q,
    kv_buffer,
    o,
    qo_indptr,
    kv_indptr,
    kv_indices,
    kv_last_page_lens,
    max_seqlen_q,
    page_size=1,
    nhead_kv=1,
    sm_scale=None,
    q_scale=None,
    kv_scale=None,
    return_lse=False,
    causal=True,
):
    """Have the signature of AITER's decode: rows of one query length, and an output buffer."""
    assert return_lse
    assert (qo_indptr.diff() == max_seqlen_q).all()
    pages = kv_indptr.diff()
    lens = torch.where(pages > 0, (pages - 1) * page_size + kv_last_page_lens, 0)
    table = torch.zeros(len(pages), max(int(pages.max()), 1), dtype=torch.int32)
    for b, count in enumerate(pages.tolist()):
        table[b, :count] = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
    cache = kv_buffer.squeeze(2)
    if kv_scale is not None:
        cache = cache.float() * kv_scale
    out, lse = _answer(q, cache, qo_indptr, table, lens, sm_scale, causal, o.shape[-1])
    o.copy_(out)
    return None, lse


def gqa_token_decode_attention_flash_decoding(
    q_nope,
    q_rope,
    kv_nope,
    kv_rope,
    infer_state,
    q_head_num,
    kv_lora_rank,
    q_rope_dim,
    qk_nope_head_dim,
    softmax_scale,
    out=None,
):
    """Have the signature of LightLLM's decode: slots of requests, and no lse."""
    assert infer_state.total_token_num == infer_state.b_seq_len.sum()
    judged.over_requests(
        q_nope,
        q_rope,
        torch.cat([kv_nope, kv_rope], -1),
        kv_nope,
        out,
        infer_state.req_manager.req_to_token_indexs,
        infer_state.b_req_idx,
        infer_state.b_seq_len,
        softmax_scale,
    )
    return out


def run(q_nope, q_pe, ckv_cache, kpe_cache, kv_indptr, kv_indices, sm_scale):
    """Have the signature of a definition of FlashInfer-Bench; return bfloat16, and base 2."""
    q, cache = torch.cat([q_nope, q_pe], -1), torch.cat([ckv_cache, kpe_cache], -1)
    assert cache.shape[1] == 1
    lens, rows = kv_indptr.diff(), len(q)
    table = torch.zeros(rows, max(int(lens.max()), 1), dtype=torch.int32)
    for b, count in enumerate(lens.tolist()):
        table[b, :count] = kv_indices[kv_indptr[b] : kv_indptr[b + 1]]
    starts = torch.arange(rows + 1)
    out, lse = _answer(q, cache, starts, table, lens, sm_scale, True, ckv_cache.shape[-1])  # noqa: FBT003
    return {"output": out.bfloat16(), "lse": lse / judged.LN2}


@dataclass
class _Schedule:
    pairs: int


def get_mla_metadata_dense_fp8(cache_seqlens, num_q_tokens_per_head_k, num_heads_k):
    """Have the signature of the function for metadata in the same module of vLLM."""
    assert num_heads_k == 1
    return _Schedule(num_q_tokens_per_head_k), None


def flash_mla_with_kvcache_fp8(
    q,
    k_cache,
    block_table,
    cache_seqlens,
    head_dim_v,
    tile_scheduler_metadata,
    num_splits,
    softmax_scale=None,
    causal=False,
    descale_q=None,
    descale_k=None,
):
    """Have the signature of vLLM's FlashMLA for FP8 caches: 8-bit queries, an lse [B, H, Q]."""
    rows, width, heads = q.shape[:3]
    assert tile_scheduler_metadata.pairs == width * heads
    assert q.dtype is k_cache.dtype is torch.float8_e4m3fn
    queries, keys = q.flatten(0, 1).float() * descale_q, k_cache.squeeze(2).float() * descale_k
    starts = torch.arange(rows + 1) * width
    given = starts, block_table, cache_seqlens, softmax_scale, causal
    out, lse = _answer(queries, keys, *given, head_dim_v)
    return out.bfloat16().unflatten(0, (rows, width)), lse.unflatten(0, (rows, width)).mT
