"""vLLM's Triton MLA decode kernel: ``vllm.v1.attention.ops.triton_decode_attention``.

It reads FP8 caches as numbers in the queries' data type, multiplied by the scale.

The caller passes the lse buffer. The adapter passes a float32 buffer; vLLM's own layer passes one
with the queries' data type (``v1/attention/backends/mla/triton_mla.py`` in 0.33).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_mla_adapters.declared import (
    capabilities,
    peer,
    triton_dtypes,
    triton_formats,
    version_of,
)
from paged_mla_adapters.kernel import Call, KernelBackend

MODULE = "vllm.v1.attention.ops.triton_decode_attention"
SPLITS = 4  # the engine uses 1 below 1024 tokens, which would not test the merge of splits


def create() -> KernelBackend:
    """Return a backend with the kernel.

    Raises
    ------
    Unsupported
        vLLM is not installed, or there is neither a CUDA device nor ``TRITON_INTERPRET=1``.
    """
    module, dtypes = peer(MODULE), triton_dtypes()
    return KernelBackend(
        name="vllm-triton",
        version=version_of("vllm", Path(str(module.__file__))),
        kernel=partial(attend, module.decode_attention_fwd),
        capabilities=capabilities(
            dtypes,
            cache_formats=triton_formats(dtypes),
            head_dims=((512, 64), (256, 32), (32, 16)),
        ),
    )


def attend(launch: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; return out [T, H, R] and lse [T, H]. Buffers start as NaN."""
    rows, heads, _ = call.q.shape
    rank = call.problem.dims.kv_lora_rank
    logits = call.buffer("the splits' results", (rows, heads, SPLITS, rank + 1))
    out, lse = call.answers()
    keys = call.cache.unsqueeze(2)
    scale = torch.tensor(call.problem.cache_scale, device=call.q.device)
    launch(
        call.q,
        keys,
        keys[..., :rank],
        out,
        lse,
        call.block_table,
        call.seq_lens,
        logits,
        SPLITS,
        call.problem.softmax_scale,
        call.problem.block_size,
        k_scale=scale,
        v_scale=scale,
        is_mla=True,
    )
    return out, lse
