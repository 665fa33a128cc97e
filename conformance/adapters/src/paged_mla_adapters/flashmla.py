"""FlashMLA's dense decode kernel for Hopper, from the package ``flash_mla`` or from vLLM.

vLLM contains it as ``vllm/_flashmla_C.abi3.so``. The adapter loads this library alone, so no other
file of vLLM is needed. The schedule depends on the lengths, so every call computes it again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paged_mla_adapters.declared import capabilities, need_gpu, not_installed, peer, version_of
from paged_mla_adapters.kernel import Call, KernelBackend
from paged_mla_shared.errors import Unsupported

BINARY = "vllm/_flashmla_C.abi3.so"

Launch = Callable[[Call, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""A function of a call and its queries [N, q, H, R + P] to out [N, q, H, R] and lse [N, H, q]."""


def create() -> KernelBackend:
    """Return a backend with the kernel.

    Raises
    ------
    Unsupported
        Neither the package nor vLLM's library is on Python's path, or there is no Hopper GPU.
    """
    launch, version = _from_package() or _from_vllm()
    need_gpu("FlashMLA's dense decode", 9)

    return KernelBackend(
        name="flashmla",
        version=version,
        kernel=partial(by_tokens, launch),
        capabilities=capabilities(
            frozenset({"bfloat16", "float16"}),
            block_sizes=(64,),
            head_dims=((512, 64),),
            masks=("causal", "non_causal"),
            max_query_len=128,
        ),
    )


def _from_package() -> tuple[Launch, str] | None:
    try:
        package = peer("flash_mla")
    except Unsupported:
        return None

    return by_rows(package.flash_mla_with_kvcache), version_of(
        "flash_mla", Path(str(package.__file__))
    )


def by_rows(function: Callable[..., Any]) -> Launch:
    """Return the launch of ``flash_mla_with_kvcache``; its module has ``get_mla_metadata`` too."""
    metadata = sys.modules[function.__module__].get_mla_metadata

    def launch(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        schedule, splits = metadata(call.seq_lens, q[0, :, :, 0].numel(), 1)
        out, lse = function(
            q,
            call.cache.unsqueeze(2),
            call.block_table,
            call.seq_lens,
            call.problem.dims.kv_lora_rank,
            schedule,
            splits,
            softmax_scale=call.problem.softmax_scale,
            causal=call.problem.mask == "causal",
        )
        return out, lse

    return launch


def by_tokens(launch: Launch, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch a kernel over rows; return out [T, H, R] and lse [T, H]."""
    out, lse = launch(call, call.by_rows(call.q))
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)


def _from_vllm() -> tuple[Launch, str]:
    path = library_of_vllm(BINARY)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch has no types

    def launch(call: Call, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = torch.ops._flashmla_C.dense_decode_fwd(
            q,
            call.cache.unsqueeze(2),
            call.problem.dims.kv_lora_rank,
            call.seq_lens,
            call.block_table,
            call.problem.softmax_scale,
            call.problem.mask == "causal",
            None,  # schedule
            None,  # splits
            None,  # out
        )
        return out, lse

    return launch, version_of("vllm", path)


def library_of_vllm(binary: str) -> Path:
    """Return the path of a library of vLLM in the first folder of Python's path that has it.

    Raises
    ------
    Unsupported
        No folder of the path has the library.
    """
    found = [path for entry in sys.path if (path := Path(entry) / binary).exists()]
    if not found:
        raise not_installed("vllm", binary)
    return found[0]
