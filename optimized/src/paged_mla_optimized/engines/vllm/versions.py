"""Where releases of vLLM differ, as far as these classes meet it. One source serves all.

=============================================  =======================  ======  ===================
what                                           0.25                     since   is
=============================================  =======================  ======  ===================
context parallelism is asked of                ``can_return_lse_for_    0.26    ``supports_dcp``
                                               decode``
``run_prefill_context_chunk``                  ``chunk_idx``            0.28    ``chunk``, an
                                                                                object
metadata of drafts inside a graph              not there                0.28    not claimed: built
                                                                                eagerly
whether a cache may span layers                ``get_kv_cache_stride_   0.29    ``supported_kv_
                                               order``                          cache_layouts``:
                                                                                None is any
``get_supported_kernel_block_sizes``           no argument              0.31    ``kv_cache_spec``,
                                                                                optional
``_build_decode``                                                       0.31    ``max_query_len``,
                                                                                unused
graphs over rows of unequal query lengths      not there                0.31    not claimed
names of backends                              members of an enum       0.32    a plugin may add
                                                                                members
=============================================  =======================  ======  ===================

Surfaces are recorded in ``optimized/tests/engines/vllm_surfaces``.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

RECORDED = (
    *("0.25.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0"),
    *("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
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
        What vLLM passes before 0.28: its chunks are for all rows.
    chunk : MLACommonPrefillMetadata.ContextChunk or None
        What it passes since: its chunks are for some rows, and hold their query lengths.
    """
    if chunk is not None:
        return ContextChunk(chunk.index, chunk.query_start_loc, chunk.cu_seq_lens)
    keys = metadata.chunked_context.cu_seq_lens[chunk_idx]
    return ContextChunk(int(chunk_idx or 0), metadata.query_start_loc, keys)
