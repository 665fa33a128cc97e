"""Where vLLM 0.25 and 0.33 differ, as far as these classes meet it. One source serves both.

=============================================  =======================  ===========================
what                                           0.25                     0.33
=============================================  =======================  ===========================
``get_supported_kernel_block_sizes``           no argument              ``kv_cache_spec``, optional
whether a cache may span layers                ``get_kv_cache_stride_   ``supported_kv_cache_
                                               order``                  layouts``: None is any
``_build_decode``                                                       ``max_query_len``, unused
``run_prefill_context_chunk``                  ``chunk_idx``            ``chunk``, an object
context parallelism is asked of                ``can_return_lse_for_    ``supports_dcp``
                                               decode``
metadata of drafts inside a graph              not there                not claimed: built eagerly
graphs over rows of unequal query lengths      not there                not claimed
=============================================  =======================  ===========================

The surfaces of both are recorded in ``optimized/tests/engines/vllm_surfaces``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

RECORDED = ("0.25.0", "0.33.0")
"""Releases whose surface the tests hold these classes against."""

OLDEST = (0, 25)
"""The first release that these classes are given to."""


class ContextChunk(NamedTuple):
    """A part of the rows' cached context, whichever release describes it.

    Parameters
    ----------
    number : int
        Tells the chunks of a step apart.
    cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        Of the rows that the chunk is for, from 0.
    """

    number: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


def context_chunk(metadata: Any, chunk_idx: int | None, chunk: Any) -> ContextChunk:
    """Return the chunk that a call of ``run_prefill_context_chunk`` means.

    Parameters
    ----------
    metadata : MLACommonPrefillMetadata
        Of the step.
    chunk_idx : int or None
        What 0.25 passes: its chunks are for all rows.
    chunk : MLACommonPrefillMetadata.ContextChunk or None
        What 0.33 passes: its chunks are for some rows, and hold their query lengths.
    """
    if chunk is not None:
        return ContextChunk(chunk.index, chunk.query_start_loc, chunk.cu_seq_lens)
    keys = metadata.chunked_context.cu_seq_lens[chunk_idx]
    return ContextChunk(int(chunk_idx or 0), metadata.query_start_loc, keys)
