"""The Triton kernels of paged-mla, called with the arguments of FlashInfer-Bench.

The kernels read one cache of latents and rotated keys. Each call concatenates both tensors, which
copies the whole cache. An engine that keeps one cache does not need this copy.
"""

import functools

import torch

from paged_mla import MlaConfig, MlaStep, PagedMla

LEAST = (64, 1024, 8192)  # the smallest capacity of an instance: rows, tokens, keys of a row


def capacity(least: int, needed: int) -> int:
    """Return `least` or a larger power of two >= `needed`, so that most calls share an instance."""
    return max(least, 1 << (needed - 1).bit_length())


@functools.lru_cache(maxsize=2)
def instance(
    device: torch.device,
    dtype: torch.dtype,
    sizes: tuple[int, int, int, int],
    capacities: tuple[int, int, int],
    sm_scale: float,
) -> PagedMla:
    """Return an instance for steps up to these capacities, with all its buffers."""
    num_heads, rank, rope, block_size = sizes
    max_rows, max_query_tokens, max_model_len = capacities
    config = MlaConfig(
        num_heads=num_heads,
        softmax_scale=sm_scale,
        block_size=block_size,
        max_rows=max_rows,
        max_query_tokens=max_query_tokens,
        max_model_len=max_model_len,
        kv_lora_rank=rank,
        qk_rope_head_dim=rope,
        dtype=dtype,
        lse_base="2",
    )
    return PagedMla(config, device)


def attend(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    ckv_cache: torch.Tensor,
    kpe_cache: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_indices: torch.Tensor,
    sm_scale: float,
    *,
    output: torch.Tensor,
    lse: torch.Tensor,
    qo_indptr: torch.Tensor | None = None,
    kv_last_page_len: torch.Tensor | None = None,
) -> None:
    """Write the output and its lse in base 2; wait once for the device, for the longest row."""
    tokens, rows, size = q_nope.shape[0], kv_indptr.shape[0] - 1, ckv_cache.shape[1]
    pages = kv_indptr.diff()
    keys = pages * size
    if kv_last_page_len is not None:
        keys = torch.where(pages > 0, keys - size + kv_last_page_len, 0)
    if qo_indptr is None:
        qo_indptr = torch.arange(rows + 1, dtype=torch.int32, device=pages.device)
    longest = torch.stack([pages.max(), qo_indptr.diff().max()]).tolist()
    most_pages, most_queries = (max(1, number) for number in longest)
    place = kv_indptr[:-1, None] + torch.arange(most_pages, device=pages.device)
    last = max(0, kv_indices.shape[0] - 1)
    table = kv_indices[place.clamp(max=last)] if kv_indices.shape[0] else torch.zeros_like(place)
    needed = (rows, tokens, most_pages * size)
    mla = instance(
        q_nope.device,
        q_nope.dtype,
        (q_nope.shape[1], q_nope.shape[2], q_pe.shape[2], size),
        tuple(map(capacity, LEAST, needed)),
        sm_scale,
    )
    step = MlaStep(
        qo_indptr.int(), keys.int(), table.int(), num_tokens=tokens, max_query_len=most_queries
    )
    planned = mla.plan(step)
    cache = torch.cat([ckv_cache, kpe_cache], dim=-1)
    mla.attend(q_nope, q_pe, cache, out=output, lse=lse, planned=planned)
