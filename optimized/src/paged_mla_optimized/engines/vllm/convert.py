"""Pure functions that convert vLLM's conventions for decode rows. This file imports no vLLM.

These conventions need no conversion: ``seq_lens`` counts this step's tokens. Queries are already
rotated. vLLM writes the cache and skips slot -1. Block 0 pads the tables, and no kernel reads it
for a row of length 0. Rows that pad a CUDA graph have no tokens and length 0. An lse is natural and
has shape [T, H].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paged_mla_optimized.config.attention import DTYPE_NAMES
from paged_mla_optimized.engines.tensors import FLAT_FP8
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE

KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", FLAT_FP8)
"""Values of ``--kv-cache-dtype`` whose caches the kernels read."""


def cache_format(kv_cache_dtype: str, dtype: torch.dtype) -> str:
    """Return this package's name of a cache format.

    Parameters
    ----------
    kv_cache_dtype : str
        The value of ``--kv-cache-dtype``.
    dtype : torch.dtype
        The model's dtype.

    Raises
    ------
    Unsupported
        No kernel reads a cache of this dtype in a model of `dtype`.
    """
    if dtype not in DTYPE_NAMES:
        raise Unsupported(
            f"dtype={dtype} is not supported; use one of {', '.join(map(str, DTYPE_NAMES))}"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise Unsupported(
            f"kv_cache_dtype={kv_cache_dtype} is not supported; use one of "
            f"{', '.join(KV_CACHE_DTYPES)}"
        )
    if kv_cache_dtype.startswith("fp8"):
        return FLAT_FP8
    if kv_cache_dtype not in {"auto", DTYPE_NAMES[dtype]}:
        raise Unsupported(
            f"kv_cache_dtype={kv_cache_dtype} is not supported for a model of dtype {dtype}; "
            "use auto, the model's dtype or fp8"
        )
    return PLAIN_FORMAT_OF_DTYPE[DTYPE_NAMES[dtype]]


def capacities(
    *, max_num_seqs: int, max_num_batched_tokens: int, max_graph_tokens: int, longest: int
) -> tuple[int, int]:
    """Return ``max_rows`` and ``max_query_tokens`` of the largest decode step, padding included.

    Parameters
    ----------
    max_num_seqs, max_num_batched_tokens : int
        The limits of vLLM's scheduler.
    max_graph_tokens : int
        The number of tokens of the largest CUDA graph, 0 without graphs. A graph of rows with one
        token each has as many rows as tokens.
    longest : int
        The largest number of new tokens of a row that counts as decode.
    """
    rows = max(max_num_seqs, max_graph_tokens)
    return rows, max(rows, min(rows * longest, max_num_batched_tokens))


def query_len(num_rows: int, num_tokens: int, lengths: Sequence[int]) -> int:
    """Return the query length that selects the kernel variant of a step.

    The result depends only on the padded counts, because these are the same at the capture of a
    CUDA graph and at its replays. The lengths on the host may differ between the two.

    Parameters
    ----------
    num_rows, num_tokens : int
        The counts of the step, padding included.
    lengths : sequence of int
        The candidate lengths in ascending order: 1, the length of a row with all its drafts, and
        the longest length that counts as decode.

    Returns
    -------
    int
        The first candidate with ``num_tokens <= num_rows * length``, or else the last one.
    """
    fitting = (length for length in lengths if num_tokens <= num_rows * length)
    return next(fitting, lengths[-1])
