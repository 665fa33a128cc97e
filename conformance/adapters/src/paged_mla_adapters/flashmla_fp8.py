"""FlashMLA's dense decode of FP8 caches on Hopper, from vLLM; only vLLM's fork has this kernel.

vLLM contains it as ``vllm/_flashmla_extension_C.abi3.so``, which the adapter loads alone. It takes
e4m3 queries with one scale for all. The adapter uses the smallest scale at which no query
saturates.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from paged_mla_adapters.declared import capabilities, need_gpu, version_of
from paged_mla_adapters.flashmla import library_of_vllm
from paged_mla_adapters.kernel import Call, Kernel, KernelBackend

BINARY = "vllm/_flashmla_extension_C.abi3.so"
LARGEST = 448.0


def create() -> KernelBackend:
    """Return a backend with the kernel.

    Raises
    ------
    Unsupported
        vLLM's library is not on Python's path, or there is no Hopper GPU.
    """
    path = library_of_vllm(BINARY)
    need_gpu("FlashMLA's dense FP8 decode", 9)
    torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]  # torch has no types
    return KernelBackend(
        name="flashmla-fp8",
        version=version_of("vllm", path),
        kernel=of(torch.ops._flashmla_extension_C),
        capabilities=capabilities(
            frozenset({"bfloat16"}),
            cache_formats=frozenset({"fp8_e4m3"}),
            products="fast",
            block_sizes=(64,),
            head_dims=((512, 64),),
            masks=("causal", "non_causal"),
            max_query_len=128,
        ),
    )


def of(ops: Any) -> Kernel:
    """Return the kernel of the library's operators."""
    return partial(attend, ops.get_mla_decoding_metadata_dense_fp8, partial(_launch, ops))


def _launch(ops: Any, *given: Any, **scales: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel with the arguments of vLLM's ``flash_mla_with_kvcache_fp8``."""
    q, cache, table, lens, rank, *plan = given
    answers: tuple[torch.Tensor, torch.Tensor] = ops.fwd_kvcache_mla_fp8(
        q,
        cache,
        rank,
        lens,
        table,
        scales["softmax_scale"],
        scales["causal"],
        *plan,
        scales["descale_q"],
        scales["descale_k"],
    )
    return answers


def attend(
    metadata: Callable[..., Any], launch: Callable[..., Any], call: Call
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the queries, plan and launch; return out [T, H, R] and lse [T, H].

    The queries of rows with keys determine the scale.

    Parameters
    ----------
    metadata, launch : callable
        vLLM's ``get_mla_metadata_dense_fp8`` and ``flash_mla_with_kvcache_fp8``, or functions with
        the same arguments.
    call : Call
    """
    problem, q = call.problem, call.by_rows(call.q).float()
    asked = q[call.seq_lens > 0]
    scale = asked.abs().amax() / LARGEST if asked.any() else q.new_ones(())
    codes = (q / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    pairs = q.shape[1] * q.shape[2]
    out, lse = launch(
        codes,
        call.cache.unsqueeze(2),
        call.block_table,
        call.seq_lens,
        problem.dims.kv_lora_rank,
        *metadata(call.seq_lens, pairs, 1),
        softmax_scale=problem.softmax_scale,
        causal=problem.mask == "causal",
        descale_q=scale.view(1),
        descale_k=q.new_full((1,), call.cache_scale),
    )
    return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
