"""Which query tokens of a large step the oracle answers, so that production's sizes stay cheap."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.paging import keys_of_tokens, query_spans
from paged_mla_shared.problem import Batch, Problem

MAX_WORK = 3e9  # products of an element of a query with one of a key: seconds of one core
_TILES = (16, 64, 128, 256, 512)  # edges at which kernels cut queries


def asked_tokens(problem: Problem, batch: Batch) -> NDArray[np.bool_]:
    """Return the query tokens to compare in full, bool [T].

    All of them if that is little work. Else the first and the last of every row and those around
    the edges of common tiles, as many as the work allows, then others drawn at random (the same
    for the same step).
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
    """Return how telling each token is, int64 [T]: 0 the most."""
    rank = np.full(batch.num_tokens, 2)
    for span in query_spans(batch):
        count = span.stop - span.start
        edges = {e + d for tile in _TILES for e in range(tile, count, tile) for d in (-1, 0)}
        rank[[span.start + e for e in edges]] = 1
        if count:
            rank[[span.start, span.stop - 1]] = 0
    return rank
