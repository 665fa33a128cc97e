"""vLLM's Triton MLA decode kernel: ``vllm.v1.attention.ops.triton_decode_attention``.

It reads FP8 caches as their numbers, multiplied by the scale, in the queries' type.

The lse buffer is the caller's. This one is float32; vLLM's own layer passes one of the queries'
dtype (``v1/attention/backends/mla/triton_mla.py`` in 0.33).
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
SPLITS = 4  # the engine's own choice is 1 below 1024 tokens, which would leave its join untried


def create() -> KernelBackend:
    """Return the kernel as a backend; raises ``Unsupported`` without vLLM or a device."""
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
    """Launch it on buffers of NaN."""
    rows, heads, _ = call.q.shape
    rank = call.problem.dims.kv_lora_rank
    logits = call.buffer("the splits' answers", (rows, heads, SPLITS, rank + 1))
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
