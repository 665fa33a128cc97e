"""SGLang's Triton decode kernel.

``sglang.kernels.ops.attention.decode_attention``, before 0.5.10 or so
``sglang.srt.layers.attention.triton_ops.decode_attention``.

Where the cache is FP8 it rounds weights, and queries but for their rotated part, to FP8 as they
are; scores and outputs take the cache's scale.

It returns no lse. Every split leaves its own, natural and float32; their sum of exponentials is
what the adapter answers.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paged_mla_adapters.declared import (
    FEATURES,
    capabilities,
    peer,
    triton_dtypes,
    triton_formats,
    version_of,
)
from paged_mla_adapters.kernel import Call, KernelBackend

SPLITS = 4
MODULES = (
    "sglang.kernels.ops.attention.decode_attention",
    "sglang.srt.layers.attention.triton_ops.decode_attention",
)


def create() -> KernelBackend:
    """Return the kernel as a backend; raises ``Unsupported`` without SGLang or a device."""
    module, dtypes = peer(*MODULES), triton_dtypes()
    kernel = SglangDecode(module.decode_attention_fwd)
    return KernelBackend(
        name="sglang-triton",
        version=version_of("sglang", Path(str(module.__file__))),
        kernel=kernel,
        capabilities=capabilities(
            dtypes,
            cache_formats=triton_formats(dtypes),
            products="fast",
            head_dims=((512, 64), (256, 32)),
            features=FEATURES if kernel.takes_pages else FEATURES - {"strided_cache"},
        ),
    )


class SglangDecode:
    """The kernel, with the options that this release of it has."""

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        module = sys.modules[launch.__module__]
        self._strides = getattr(module, "_extract_kv_strides", lambda *_: None)
        self._parameters = inspect.signature(self._launch).parameters

    @property
    def takes_pages(self) -> bool:
        """Whether pages may lie apart: releases before and after those that take them do not."""
        if "page_size" not in self._parameters:
            return False
        try:
            self._strides(torch.empty(1, 1, 1, 1), 1)
        except ValueError:
            return False
        return True

    def __call__(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch it on buffers of NaN."""
        rows, heads, _ = call.q.shape
        rank, lists = call.problem.dims.kv_lora_rank, call.page_lists(page_size=1)
        keys, page_size = call.cache.unsqueeze(2), call.problem.block_size
        if call.cache.is_contiguous():
            keys, page_size = keys.flatten(0, 1), 1  # as SGLang's own pool
        out, _ = call.answers()
        partial = call.buffer("the splits' outputs", (rows, heads, SPLITS, rank))
        lse = call.buffer("the splits' lse", (rows, heads, SPLITS), fill=-torch.inf)
        splits = torch.full((rows,), SPLITS, dtype=torch.int32, device=call.q.device)
        scale = call.cache_scale
        options = {"k_scale": scale, "v_scale": scale, "has_mla": True, "page_size": page_size}
        self._launch(
            call.q,
            keys,
            keys[..., :rank],
            out,
            lists.indptr,
            lists.indices.long(),
            partial,
            lse,
            splits,
            SPLITS,
            call.problem.softmax_scale,
            **{name: options[name] for name in options if name in self._parameters},
        )
        return out, torch.logsumexp(lse, -1)
