"""SGLang's Triton decode kernel.

Its module is ``sglang.kernels.ops.attention.decode_attention``, and in releases before about 0.5.10
``sglang.srt.layers.attention.triton_ops.decode_attention``.

Over an FP8 cache the kernel rounds the weights and the latent part of the queries to FP8 without
a scale of their own. It multiplies scores and outputs by the cache's scale.

The kernel returns no lse. It writes a natural float32 lse for each split, and the adapter returns
the logarithm of the sum of their exponentials.
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
    """Return a backend with the kernel.

    Raises
    ------
    Unsupported
        SGLang is not installed, or there is neither a CUDA device nor ``TRITON_INTERPRET=1``.
    """
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
    """The kernel, called with the options that the installed release has.

    Parameters
    ----------
    launch : callable
        SGLang's ``decode_attention_fwd``.
    """

    def __init__(self, launch: Callable[..., Any]) -> None:
        self._launch = launch
        module = sys.modules[launch.__module__]
        self._strides = getattr(module, "_extract_kv_strides", lambda *_: None)
        self._parameters = inspect.signature(self._launch).parameters

    @property
    def takes_pages(self) -> bool:
        """Whether the cache may have gaps between pages, which only some releases support."""
        if "page_size" not in self._parameters:
            return False
        try:
            self._strides(torch.empty(1, 1, 1, 1), 1)
        except ValueError:
            return False
        return True

    def __call__(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernel; return out [T, H, R] and lse [T, H].

        Buffers start as NaN, and the lse of each split starts as -inf.
        """
        rows, heads, _ = call.q.shape
        rank, lists = call.problem.dims.kv_lora_rank, call.page_lists(page_size=1)
        keys, page_size = call.cache.unsqueeze(2), call.problem.block_size
        if call.cache.is_contiguous():
            keys, page_size = keys.flatten(0, 1), 1  # the layout of SGLang's own pool
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
