"""Rules S-8 and S-21: attention in chunks to a context that is too long for one workspace.

A step's tokens see all keys that were cached before them, so attention to a chunk of context is not
causal; attention to the step's own keys is causal. Each part has an output with its lse in nats,
and the outputs are merged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.merge import merge_unchecked
from paged_mla_reference.rules.rounding import round_to
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Output, cu_seqlens_of


@dataclass(frozen=True)
class ContextChunk:
    """A part of each row's context: ``lens`` tokens from ``starts`` on, int64 [B]; 0 is legal."""

    starts: NDArray[np.int64]
    lens: NDArray[np.int64]


def context_chunks(context_lens: NDArray[np.int64], workspace: int) -> list[ContextChunk]:
    """Concatenate the contexts of all rows and cut them every `workspace` tokens.

    Every chunk except the last fills the workspace, for rows of any lengths. A row without a token
    in a chunk has length 0 there.

    Parameters
    ----------
    context_lens : int64 [B]
    workspace : int
        Tokens of a chunk, >= 1.

    Returns
    -------
    list of ContextChunk
        Empty if no row has context.
    """
    stops = np.cumsum(context_lens)
    total = int(context_lens.sum())
    chunks = []
    for begin in range(0, total, workspace):
        starts = np.clip(begin - (stops - context_lens), 0, context_lens)
        ends = np.clip(begin + workspace - (stops - context_lens), 0, context_lens)
        chunks.append(ContextChunk(starts, ends - starts))
    return chunks


def parts_of(batch: PrefillBatch, workspace: int) -> list[PrefillBatch]:
    """Split a causal prefill into chunks of the keys before its queries, and the queries' own keys.

    Parameters
    ----------
    batch : PrefillBatch
        Causal.
    workspace : int
        Keys of a chunk, >= 1.

    Returns
    -------
    list of PrefillBatch
        Non-causal batches of the chunks, then one causal batch of the queries' own keys.
    """
    own = np.minimum(batch.query_lens, batch.seq_lens).astype(np.int64)
    contexts = np.where(own > 0, batch.seq_lens - own, 0)  # a row without a query needs no context
    chunks = context_chunks(contexts, workspace)
    return [
        *(replace(of_keys(batch, chunk), causal=False) for chunk in chunks),
        of_keys(batch, ContextChunk(contexts, own)),
    ]


def of_keys(batch: PrefillBatch, chunk: ContextChunk) -> PrefillBatch:
    """Return the batch with only those keys of each row that `chunk` selects."""
    firsts = batch.cu_seqlens_k[:-1] + chunk.starts  # [B]
    spans = [np.arange(n) + first for first, n in zip(firsts, chunk.lens, strict=True)]
    keys = np.concatenate([np.zeros(0, np.int64), *spans])
    return replace(
        batch,
        cu_seqlens_k=cu_seqlens_of(chunk.lens),
        k_nope=batch.k_nope[keys],
        k_pe=batch.k_pe[keys],
        v=batch.v[keys],
    )


def merge_parts(answers: Sequence[Output]) -> Output:
    """Return the output over all keys, in float32, from outputs over parts of the keys (S-8)."""
    wide = [Output(round_to(answer.out, "float32"), answer.lse) for answer in answers]
    return merge_unchecked(wide)
