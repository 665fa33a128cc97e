"""vLLM's conventions for decode rows, as pure functions: no vLLM here.

What needs no conversion: ``seq_lens`` counts this step's tokens; queries arrive rotated, and the
cache is written by vLLM, which skips slot -1; block 0 pads tables and is never read for a row of
length 0; rows that pad a CUDA graph have no tokens and length 0; an lse is natural, [T, H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", FLAT_FP8)
"""Words of ``--kv-cache-dtype`` that name a cache these kernels read."""


def cache_format(kv_cache_dtype: str, dtype: torch.dtype) -> str:
    """Return our name of the cache that a model of `dtype` has.

    Raises
    ------
    Unsupported
        No kernel reads it.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise Unsupported(f"kv_cache_dtype {kv_cache_dtype}: {', '.join(KV_CACHE_DTYPES)}")
    if kv_cache_dtype.startswith("fp8"):
        return FLAT_FP8
    if kv_cache_dtype not in {"auto", DTYPE_NAMES[dtype]}:
        raise Unsupported(f"kv_cache_dtype {kv_cache_dtype} of a model of {dtype}: the same type")
    return PLAIN_FORMAT_OF_DTYPE[DTYPE_NAMES[dtype]]


def capacities(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_graph_tokens: int, longest: int
) -> tuple[int, int]:
    """Return ``max_rows`` and ``max_query_tokens`` of the largest decode step, padding included.

    Parameters
    ----------
    max_num_seqs, max_num_batched_tokens : int
        Of the scheduler.
    max_graph_tokens : int
        Tokens of the largest CUDA graph, 0 without one: of one token each they are as many rows.
    longest : int
        Most new tokens of a row that counts as decode.
    """
    rows = max(max_num_seqs, max_graph_tokens)
    return rows, max(rows, min(rows * longest, max_num_batched_tokens))


def query_len(num_rows: int, num_tokens: int, lengths: Sequence[int]) -> int:
    """Return the query length that a step's kernel is chosen for.

    It follows from the padded counts alone, which a CUDA graph has in common with its replays:
    what the host knows of a batch's rows may differ between the two.

    Parameters
    ----------
    num_rows, num_tokens : int
        Padding included.
    lengths : sequence of int
        Ascending: 1, what a row with all its drafts has, the longest.
    """
    fitting = (length for length in lengths if num_tokens <= num_rows * length)
    return next(fitting, lengths[-1])
