"""The differences between releases of vLLM that matter here. One source supports all of them.

=============================================  =======================  ======  ===================
interface                                      in 0.25                  since   is
=============================================  =======================  ======  ===================
support of context parallelism                 ``can_return_lse_for_    0.26    ``supports_dcp``
                                               decode``
``run_prefill_context_chunk``                  ``chunk_idx``            0.28    ``chunk``, an
                                                                                object
metadata of drafts inside a graph              does not exist           0.28    not declared here:
                                                                                vLLM builds it
                                                                                eagerly
whether a cache may span layers                ``get_kv_cache_stride_   0.29    ``supported_kv_
                                               order``                          cache_layouts``:
                                                                                None allows all
``get_supported_kernel_block_sizes``           no argument              0.31    ``kv_cache_spec``,
                                                                                optional
``_build_decode``                              no ``max_query_len``     0.31    ``max_query_len``,
                                                                                unused here
graphs over rows of unequal query lengths      do not exist             0.31    not declared here
names of backends                              fixed members of an      0.32    a plugin may add
                                               enum                             members
=============================================  =======================  ======  ===================

``optimized/tests/engines/vllm_surfaces`` contains the recorded interfaces of each release.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

RECORDED = (
    *("0.25.0", "0.25.1", "0.26.0", "0.27.1", "0.28.0"),
    *("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
"""The releases whose recorded interfaces the tests compare with these classes."""

OLDEST = (0, 25)
"""The first release in which the backends are registered."""


class ContextChunk(NamedTuple):
    """A chunk of the rows' cached context, in a form that does not depend on the release.

    Parameters
    ----------
    number : int
        The number of the chunk within its step.
    cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        Prefix sums, from 0, of the query lengths and key lengths of the chunk's rows.
    """

    number: int
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor


def context_chunk(metadata: Any, chunk_idx: int | None, chunk: Any) -> ContextChunk:
    """Return the chunk that the arguments of ``run_prefill_context_chunk`` describe.

    Parameters
    ----------
    metadata : MLACommonPrefillMetadata
        The metadata of the step.
    chunk_idx : int or None
        The argument of vLLM before 0.28, whose chunks contain all rows.
    chunk : MLACommonPrefillMetadata.ContextChunk or None
        The argument of vLLM 0.28 and later, whose chunks contain some rows and their query lengths.
    """
    if chunk is not None:
        return ContextChunk(chunk.index, chunk.query_start_loc, chunk.cu_seq_lens)
    keys = metadata.chunked_context.cu_seq_lens[chunk_idx]
    return ContextChunk(int(chunk_idx or 0), metadata.query_start_loc, keys)
