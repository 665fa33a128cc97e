"""SGLang's conventions as pure functions: no SGLang here.

What needs no conversion: queries arrive absorbed and rotated; the map of requests to tokens holds
every slot that is seen, those of a cached prefix too; rows that pad a CUDA graph have the length
that this backend asks for, 1, and line 0 of the map, which is nobody's and leads to slot 0.
"""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE


def cache_format(stored: torch.dtype, dtype: torch.dtype) -> str:
    """Return our name of the cache that a pool of type `stored` is to a model of `dtype`.

    Raises
    ------
    Unsupported
        No kernel reads it.
    """
    if stored is torch.float8_e4m3fn:
        return FLAT_FP8
    if stored is not dtype:
        raise Unsupported(f"kv_cache_dtype {stored} of a model of {dtype}: the same, or fp8_e4m3")
    return PLAIN_FORMAT_OF_DTYPE[DTYPE_NAMES[dtype]]


def capacities(
    *,
    max_requests: int,
    rank_multiple: int,
    chunked_prefill_size: int | None,
    chunks_grow: bool,
    graph_tokens: int,
    max_prefill_tokens: int,
    context_len: int,
    query_len: int,
) -> tuple[int, int]:
    """Return ``max_rows`` and ``max_query_tokens`` of the largest step.

    Parameters
    ----------
    max_requests : int
        Of the pool of requests: no graph is larger.
    rank_multiple : int
        Ranks that share a batch's heads: of data parallelism, eager steps are padded to as many
        rows, or a multiple.
    chunked_prefill_size : int or None
        Of the scheduler; -1 or ``None`` lets a prompt be as long as the context.
    chunks_grow : bool
        The scheduler chooses longer chunks too, up to ``max_prefill_tokens``, and before it serves
        it tries up to a quarter more than ``chunked_prefill_size``.
    graph_tokens : int
        Of the largest graph of prompts, 0 without: SGLang may capture more than a chunk.
    max_prefill_tokens, context_len : int
    query_len : int
        New tokens of a row with all its drafts, 1 without.
    """
    rows = -(-max_requests // rank_multiple) * rank_multiple
    prompts = max(max_prefill_tokens, context_len)
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        chunk = chunked_prefill_size
        if chunks_grow:
            chunk = max(chunk * 5 // 4, max_prefill_tokens)
        prompts = min(prompts, chunk)
    return rows, max(prompts, graph_tokens) + rows * query_len  # MIXED steps have both


def as_blocks(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return a layer's pool [S, 1, R + P] as blocks [S / page_size, page_size, R + P]."""
    return slots.view(-1, page_size, slots.shape[-1])


def starts_of(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Return prefix sums of lengths, int32 [B + 1]."""
    starts = extend_seq_lens.new_zeros(len(extend_seq_lens) + 1, dtype=torch.int32)
    torch.cumsum(extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def own_masks(full: torch.Tensor, prefix_lens: torch.Tensor, query_len: int) -> torch.Tensor:
    """Return what drafts see of each other, from masks that spell out the context too.

    A gather of a size that the host knows: nothing waits for the device.

    Parameters
    ----------
    full : bool or uint8, flat
        For each row a matrix [query_len, prefix_len + query_len], SGLang's ``FULL_MASK``; maybe
        longer, or shorter where rows only pad.
    prefix_lens : int [B]
        Cached tokens, drafts not among them.
    query_len : int

    Returns
    -------
    bool, flat
        For each row a matrix [query_len, query_len], ``QLEN_ONLY``.
    """
    widths = prefix_lens.long() + query_len
    bases = query_len * (widths.cumsum(0) - widths) + prefix_lens
    node = torch.arange(query_len, device=full.device)
    cells = bases[:, None, None] + node[:, None] * widths[:, None, None] + node
    return full[cells.clamp_(0, len(full) - 1)].bool().flatten()
