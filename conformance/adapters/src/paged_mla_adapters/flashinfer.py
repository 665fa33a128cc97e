"""FlashInfer's MLA kernels: ``flashinfer.mla.BatchMLAPagedAttentionWrapper``, of 0.7 and later.

They support rows of any query lengths in one call, and blocks of any size. The plan depends on the
lengths, so the adapter plans before every call. The lse has base 2, which engines use as well.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType

import torch

from paged_mla_adapters.call import WORKSPACE_BYTES  # the size that its documentation recommends
from paged_mla_adapters.declared import FEATURES, capabilities, need_gpu, peer, version_of
from paged_mla_adapters.kernel import Call, KernelBackend


def fa2() -> KernelBackend:
    """Return a backend with the kernel for Ampere and later GPUs; it raises as :func:`fa3`."""
    return _backend("fa2", *range(8, 13))


def fa3() -> KernelBackend:
    """Return a backend with the kernel for Hopper.

    Raises
    ------
    Unsupported
        FlashInfer is not installed, or there is no GPU that the kernel supports.
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
    """Plan and launch the kernel; return out [T, H, R] and lse [T, H], which started as NaN."""
    problem, pages = call.problem, call.page_lists()
    workspace = call.workspace(workspace_bytes)
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(
        metadata=mla.MLAPlanMetadata.csr(
            qo_indptr=call.cu_seqlens_q,
            kv_indptr=pages.indptr,
            kv_indices=pages.indices,
            kv_len_arr=call.seq_lens,
        ),
        num_heads=problem.dims.num_heads,
        head_dim_ckv=problem.dims.kv_lora_rank,
        head_dim_kpe=problem.dims.qk_rope_head_dim,
        page_size=problem.block_size,
        causal=problem.mask == "causal",
        sm_scale=problem.softmax_scale,
        q_data_type=call.q.dtype,
        kv_data_type=call.cache.dtype,
        lse_mode="base2",
    )
    out, lse = call.answers()
    wrapper.run(query=call.q, kv_cache=call.cache, out=out, lse=lse, return_lse=True)
    return out, lse
