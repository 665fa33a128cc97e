"""Rules S-8 and S-21: a context too long for one workspace, attended to in chunks.

A step's tokens see all of what was cached before them, so a chunk of context is not causal; the
step's own keys are. Each part answers with its lse in nats, and the answers are merged.
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
    """Some of each row's context: ``lens`` tokens from ``starts`` on, int64 [B], 0 for none."""

    starts: NDArray[np.int64]
    lens: NDArray[np.int64]


def context_chunks(context_lens: NDArray[np.int64], workspace: int) -> list[ContextChunk]:
    """Cut the contexts of all rows, laid one behind the other, every `workspace` tokens.

    Every chunk but the last fills the workspace, however the rows' lengths differ; a row that has
    no token in a chunk has length 0 there.

    Parameters
    ----------
    context_lens : int64 [B]
    workspace : int
        Tokens of a chunk, >= 1.
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
    """Return a causal prefill as chunks of what precedes its queries, and the queries' own keys.

    Parameters
    ----------
    batch : PrefillBatch
        Causal.
    workspace : int
    """
    own = np.minimum(batch.query_lens, batch.seq_lens).astype(np.int64)
    contexts = np.where(own > 0, batch.seq_lens - own, 0)  # of a row without a query: nothing
    chunks = context_chunks(contexts, workspace)
    return [
        *(replace(of_keys(batch, chunk), causal=False) for chunk in chunks),
        of_keys(batch, ContextChunk(contexts, own)),
    ]


def of_keys(batch: PrefillBatch, chunk: ContextChunk) -> PrefillBatch:
    """Return the batch with some of each row's keys alone."""
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
    """Return the answer over all keys, in float32, from answers over parts of them (S-8)."""
    wide = [Output(round_to(answer.out, "float32"), answer.lse) for answer in answers]
    return merge_unchecked(wide)
