"""AITER's decode for AMD's GPUs, ``aiter.mla:mla_decode_fwd``.

It takes pages as CSR lists, and all rows of a call have the same number of query tokens. The caller
passes the output. The function returns a natural lse as its second result. Source: ``aiter/mla.py``
at e4048607.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paged_mla_adapters.judge.attend_arguments import AttendArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_adapters.kernel import Call

_CLAIMS = Claims("", cache="[blocks, size, 1, D]", roles={"kv_last_page_lens": "kv_last_page_len"})


def attend(function: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the function with an output full of NaN; return out [T, H, R] and lse [T, H]."""
    given = AttendArguments(call, _CLAIMS)
    out: torch.Tensor = given.of("out")
    is_fp8 = call.cache.dtype is torch.float8_e4m3fn
    _, lse = function(
        call.q,
        given.of("kv_cache"),
        out,
        call.cu_seqlens_q,
        given.of("kv_indptr"),
        given.of("kv_indices"),
        given.of("kv_last_page_len"),
        given.of("max_query_len"),
        page_size=call.problem.block_size,
        nhead_kv=1,
        sm_scale=call.problem.softmax_scale,
        kv_scale=given.of("k_descale") if is_fp8 else None,
        return_lse=True,
        causal=given.of("causal"),
    )
    return out, lse
