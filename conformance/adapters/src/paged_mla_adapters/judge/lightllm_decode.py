"""LightLLM's decode, ``gqa_token_decode_attention_flash_decoding``.

It takes the step as an object, ``infer_state``, a cache with one axis of slots, and the slots of
each request. It returns no lse. Source: ``models/deepseek2/triton_kernel/gqa_flash_decoding.py``
and ``models/deepseek2/layer_infer/transformer_layer_infer.py`` at fc72ffab.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from paged_mla_adapters.judge.attend_arguments import AttendArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.kernel import Call

_CLAIMS = Claims("", cache="[slots, 1, D]", roles={"b_req_idx": "request_ids"})


def attend(function: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the function with the two parts of queries and cache; the returned lse is 0."""
    given, dims = AttendArguments(call, _CLAIMS), call.problem.dims
    keys: torch.Tensor = given.of("kv_cache")
    state = SimpleNamespace(
        batch_size=len(call.seq_lens),
        max_len_in_batch=given.of("max_seq_len"),
        total_token_num=int(call.seq_lens.sum()),
        req_manager=SimpleNamespace(req_to_token_indexs=given.of("req_to_token")),
        b_req_idx=given.of("request_ids"),
        b_seq_len=call.seq_lens,
    )
    out = given.of("out")
    function(
        given.of("q_nope"),
        given.of("q_pe"),
        keys[..., : dims.kv_lora_rank],
        keys[..., dims.kv_lora_rank :],
        state,
        call.q.shape[1],
        dims.kv_lora_rank,
        dims.qk_rope_head_dim,
        dims.qk_nope_head_dim,
        call.problem.softmax_scale,
        out=out,
    )
    return out, torch.zeros(call.q.shape[:2], device=out.device)
