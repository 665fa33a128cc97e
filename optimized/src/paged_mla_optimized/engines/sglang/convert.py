"""Pure functions that convert SGLang's conventions. This file imports no SGLang.

These conventions need no conversion: queries are already absorbed and rotated. The map from
requests to tokens contains the slot of every key, including the keys of a cached prefix. Rows that
pad a CUDA graph have the length 1, which the backend returns as the fill value, and use line 0 of
the map, which belongs to no request and contains slot 0.
"""

from __future__ import annotations

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE


def cache_format(stored: torch.dtype, dtype: torch.dtype) -> str:
    """Return this package's name of a cache format.

    Parameters
    ----------
    stored : torch.dtype
        The dtype of the pool.
    dtype : torch.dtype
        The model's dtype.

    Raises
    ------
    Unsupported
        No kernel reads a cache of this dtype in a model of `dtype`.
    """
    if dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"dtype={dtype} is not supported by paged_mla; "
            f"use one of {', '.join(map(str, DTYPE_NAMES))}"
        )
    if stored is torch.float8_e4m3fn:
        return FLAT_FP8
    if stored is not dtype:
        raise Unsupported(
            f"kv_cache_dtype={stored} is not supported by paged_mla for a model of dtype {dtype}; "
            "use auto or fp8_e4m3"
        )
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
        The size of the request pool. No graph has more rows.
    rank_multiple : int
        The number of ranks that share the heads of a batch. With data parallelism SGLang pads the
        rows of an eager step to a multiple of it.
    chunked_prefill_size : int or None
        The scheduler's limit; with -1 or ``None`` a prompt is processed whole.
    chunks_grow : bool
        Whether the scheduler may choose longer chunks, up to ``max_prefill_tokens``. While it
        starts, it then also tries chunks up to a quarter longer than ``chunked_prefill_size``.
    graph_tokens : int
        The number of tokens of the largest prefill graph, 0 without prefill graphs. SGLang may
        capture graphs that are longer than a chunk.
    max_prefill_tokens, context_len : int
        The scheduler's limit for one step, and the longest context.
    query_len : int
        The number of new tokens of a row with all its drafts, 1 without drafts.
    """
    rows = -(-max_requests // rank_multiple) * rank_multiple
    prompts = max(max_prefill_tokens, context_len)
    if chunked_prefill_size is not None and chunked_prefill_size > 0:
        chunk = chunked_prefill_size
        if chunks_grow:
            chunk = max(chunk * 5 // 4, max_prefill_tokens)
        prompts = min(prompts, chunk)
    return rows, max(prompts, graph_tokens) + rows * query_len  # a MIXED step contains both


def as_blocks(slots: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return a layer's pool [S, 1, R + P] as blocks [S / page_size, page_size, R + P]."""
    return slots.view(-1, page_size, slots.shape[-1])


def starts_of(extend_seq_lens: torch.Tensor) -> torch.Tensor:
    """Return prefix sums of lengths, int32 [B + 1]."""
    starts = extend_seq_lens.new_zeros(len(extend_seq_lens) + 1, dtype=torch.int32)
    torch.cumsum(extend_seq_lens, 0, dtype=torch.int32, out=starts[1:])
    return starts


def own_masks(full: torch.Tensor, prefix_lens: torch.Tensor, query_len: int) -> torch.Tensor:
    """Return the masks between drafts from masks that also cover the cached context.

    The size of the result is known on the host, so the function does not wait for the device.

    Parameters
    ----------
    full : bool or uint8, flat
        SGLang's ``FULL_MASK``: for each row a matrix [query_len, prefix_len + query_len]. The
        tensor may be longer, or shorter if the last rows are padding.
    prefix_lens : int [B]
        The number of cached tokens of each row, without the drafts.
    query_len : int
        The number of drafts of each row.

    Returns
    -------
    bool, flat
        SGLang's ``QLEN_ONLY``: for each row a matrix [query_len, query_len].
    """
    widths = prefix_lens.long() + query_len
    bases = query_len * (widths.cumsum(0) - widths) + prefix_lens
    node = torch.arange(query_len, device=full.device)
    cells = bases[:, None, None] + node[:, None] * widths[:, None, None] + node
    return full[cells.clamp_(0, len(full) - 1)].bool().flatten()
