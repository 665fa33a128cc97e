"""FlashAttention 3, which takes the latent part of absorbed queries as queries of the values.

Two functions have this parameter. ``vllm.vllm_flash_attn:flash_attn_varlen_func`` of 0.25 calls it
``q_v``, and ``flash_attn_interface:flash_attn_with_kvcache`` of the package ``flash-attn-3`` calls
it ``qv``. Both return a natural lse [H, T]. Sources: ``vllm_flash_attn/flash_attn_interface.py``
and ``v1/attention/backends/mla/flashattn_mla.py`` of vLLM 0.25.0, and
``hopper/flash_attn_interface.py`` of Dao-AILab/flash-attention.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paged_mla_adapters.judge.attend_arguments import AttendArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.kernel import Call, Kernel
from paged_mla_shared.errors import InvalidArgument

_CLAIMS = Claims("")


def bind(function: Callable[..., Any]) -> Kernel:
    """Return the kernel of either function.

    Raises
    ------
    InvalidArgument
        The function has neither a parameter ``q_v`` nor ``qv``.
    """
    names = inspect.signature(function).parameters
    for name, attend in (("q_v", _varlen), ("qv", _with_kvcache)):
        if name in names:
            return partial(attend, function)
    raise InvalidArgument("--like fa3", ", ".join(names), "a function with a parameter q_v or qv")


def _varlen(function: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    given, keys, values = _parts(call)
    out, lse = function(
        q=given.of("q_pe"),
        k=keys,
        v=values,
        q_v=given.of("q_nope"),
        max_seqlen_q=given.of("max_query_len"),
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_k=given.of("max_seq_len"),
        seqused_k=call.seq_lens,
        block_table=call.block_table,
        softmax_scale=call.problem.softmax_scale,
        causal=given.of("causal"),
        return_softmax_lse=True,
        fa_version=3,
    )
    return out, lse.T


def _with_kvcache(function: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    given, keys, values = _parts(call)
    out, lse, *_ = function(
        given.of("q_pe"),
        keys,
        values,
        qv=given.of("q_nope"),
        cache_seqlens=call.seq_lens,
        page_table=call.block_table,
        cu_seqlens_q=call.cu_seqlens_q,
        max_seqlen_q=given.of("max_query_len"),
        softmax_scale=call.problem.softmax_scale,
        causal=given.of("causal"),
        return_softmax_lse=True,
    )
    return out, lse.T


def _parts(call: Call) -> tuple[AttendArguments, torch.Tensor, torch.Tensor]:
    """Return the arguments, the rotated keys and the latents; these are [blocks, size, 1, ...]."""
    rank, cache = call.problem.dims.kv_lora_rank, call.cache.unsqueeze(2)
    return AttendArguments(call, _CLAIMS), cache[..., rank:], cache[..., :rank]
