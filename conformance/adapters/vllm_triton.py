"""vLLM's Triton MLA decode kernel: ``vllm.v1.attention.ops.triton_decode_attention``.

The lse buffer is the caller's. This one is float32; vLLM's own layer passes one of the queries'
dtype (``v1/attention/backends/mla/triton_mla.py`` in 0.33).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from adapters.decode import FEATURES, FORMATS, Call, DecodeBackend, triton_dtypes, version_of
from paged_mla_shared.backend import Capabilities

MODULE = "vllm.v1.attention.ops.triton_decode_attention"
SPLITS = 4  # the engine's own choice is 1 below 1024 tokens, which would leave its join untried


def create() -> DecodeBackend:
    """Return the kernel as a backend."""
    module, dtypes = importlib.import_module(MODULE), triton_dtypes()
    return DecodeBackend(
        name="vllm-triton",
        version=version_of("vllm", Path(str(module.__file__))),
        kernel=partial(attend, module.decode_attention_fwd),
        capabilities=Capabilities(
            ops=frozenset({"plan", "append", "attend"}),
            dtypes=dtypes,
            cache_formats=frozenset(FORMATS[name] for name in dtypes),
            block_sizes=frozenset(range(1, 257)),
            num_heads=frozenset(range(1, 129)),
            head_dims=frozenset({(512, 64), (256, 32), (32, 16)}),
            masks=frozenset({"causal"}),
            features=FEATURES,
            max_query_len=1,
        ),
    )


def attend(launch: Callable[..., Any], call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch it on buffers of NaN."""
    rows, _, heads, _ = call.q.shape
    rank, device = call.problem.dims.kv_lora_rank, call.q.device
    logits = torch.full((rows, heads, SPLITS, rank + 1), torch.nan, device=device)
    out = torch.full((rows, heads, rank), torch.nan, dtype=call.q.dtype, device=device)
    lse = torch.full((rows, heads), torch.nan, device=device)
    keys = call.cache.unsqueeze(2)
    launch(
        call.q[:, 0],
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
        is_mla=True,
    )
    return out.unsqueeze(1), lse.unsqueeze(1)
