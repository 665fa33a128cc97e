"""Choose the query tokens of a large step for which the oracle computes the output."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.paging import keys_of_tokens, query_spans
from paged_mla_shared.problem import Batch, Problem

MAX_WORK = 3e9  # multiplications of query and key elements, which take seconds on one core
_TILES = (16, 64, 128, 256, 512)  # sizes of query tiles in kernels


def asked_tokens(problem: Problem, batch: Batch) -> NDArray[np.bool_]:
    """Return the query tokens to compare in full, bool [T].

    If the work is small, all tokens are compared. Otherwise the first and last token of every row
    have priority, then tokens at the edges of common tiles, then random tokens, up to ``MAX_WORK``.
    The choice is the same for the same step.
    """
    tokens = batch.num_tokens
    work = keys_of_tokens(batch) * problem.dims.num_heads * problem.dims.cached_dim
    if work.sum() <= MAX_WORK:
        return np.ones(tokens, bool)
    order = np.random.default_rng(tokens).permutation(tokens)
    order = order[np.argsort(_rank(batch)[order], kind="stable")]
    within = np.cumsum(work[order]) <= MAX_WORK
    within[0] = True
    asked = np.zeros(tokens, bool)
    asked[order[within]] = True
    return asked


def _rank(batch: Batch) -> NDArray[np.int64]:
    """Return the priority of each token, int64 [T]; 0 is the highest."""
    rank = np.full(batch.num_tokens, 2)
    for span in query_spans(batch):
        count = span.stop - span.start
        edges = {e + d for tile in _TILES for e in range(tile, count, tile) for d in (-1, 0)}
        rank[[span.start + e for e in edges]] = 1
        if count:
            rank[[span.start, span.stop - 1]] = 0
    return rank
