"""FlashInfer's MLA kernels: ``flashinfer.mla.BatchMLAPagedAttentionWrapper``, of 0.7 and later.

They take rows of any query lengths in one call, and blocks of any size. The plan depends on the
lengths and is made anew for every call. The lse is in base 2, as engines take it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from paged_mla_adapters.declared import FEATURES, capabilities, need_gpu, peer, version_of
from paged_mla_adapters.kernel import Call, KernelBackend

WORKSPACE_BYTES = 128 << 20  # where its documentation says to begin


def fa2() -> KernelBackend:
    """Return the kernel for GPUs since Ampere as a backend; raises as :func:`fa3`."""
    return _backend("fa2", *range(8, 13))


def fa3() -> KernelBackend:
    """Return the kernel for Hopper as a backend.

    Raises
    ------
    Unsupported
        FlashInfer is not installed, or there is no GPU that it runs on.
    """
    return _backend("fa3", 9)


def _backend(name: str, *majors: int) -> KernelBackend:
    mla = peer("flashinfer.mla")
    need_gpu(f"FlashInfer's {name}", *majors)
    return KernelBackend(
        name=f"flashinfer-{name}",
        version=version_of("flashinfer-python", Path(str(mla.__file__))),
        kernel=partial(attend, mla, name),
        capabilities=capabilities(
            frozenset({"bfloat16", "float16"}),
            head_dims=((512, 64),),
            masks=("causal", "non_causal"),
            features=FEATURES | {"mixed"},
            max_query_len=1 << 20,
        ),
    )


def attend(
    mla: ModuleType, backend: str, call: Call, workspace_bytes: int = WORKSPACE_BYTES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plan and launch it on buffers of NaN."""
    problem, device = call.problem, call.q.device
    dims, tokens = problem.dims, len(call.q)
    workspace = call.buffer("the workspace", (workspace_bytes,), torch.uint8, fill=0xFF)  # NaN
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    pages = -(-call.seq_lens // problem.block_size)
    entry = torch.arange(call.block_table.shape[1], device=device)
    wrapper.plan(
        metadata=mla.MLAPlanMetadata.csr(
            qo_indptr=call.cu_seqlens_q,
            kv_indptr=torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int(),
            kv_indices=call.block_table[entry < pages[:, None]],
            kv_len_arr=call.seq_lens,
        ),
        num_heads=dims.num_heads,
        head_dim_ckv=dims.kv_lora_rank,
        head_dim_kpe=dims.qk_rope_head_dim,
        page_size=problem.block_size,
        causal=problem.mask == "causal",
        sm_scale=problem.softmax_scale,
        q_data_type=call.q.dtype,
        kv_data_type=call.cache.dtype,
        lse_mode="base2",
    )
    shape = (tokens, dims.num_heads, dims.kv_lora_rank)
    out = call.buffer("the output", shape, call.q.dtype)
    lse = call.buffer("the lse", shape[:2])
    wrapper.run(query=call.q, kv_cache=call.cache, out=out, lse=lse, return_lse=True)
    return out, lse
