"""View one query token together with all keys of its row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import errors_of
from paged_mla_reference.explain.checks.examination import Examination, Right
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.rules.cache import read_keys
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import keys_of_tokens, query_spans
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import widen
from paged_mla_shared.problem import Batch

Array = NDArray[np.float64]


@dataclass(frozen=True)
class QueryView:
    """A query token and the keys of its row.

    Parameters
    ----------
    token, row : int
    query : float64 [H, R+P]
        Rotated, if the problem has a rope.
    seen : bool [S]
        The keys that the token sees.
    scores : float64 [H, S]
        The scaled scores of all keys of the row.
    lse : float64 [H]
        The right lse.
    """

    token: int
    row: int
    query: Array
    seen: NDArray[np.bool_]
    scores: Array
    lse: Array

    @property
    def shares(self) -> Array:
        """The weight of each key relative to the sum over the keys seen, float64 [H, S]."""
        with np.errstate(over="ignore"):
            return np.exp(self.scores - self.lse[:, None])


def views_of_wrong(found: Examination, most: int) -> Iterator[QueryView]:
    """Return wrong query tokens with fewest keys, at most one per row and `most` in all."""
    step, right = found.step, found.right
    if right is None or step.batch is None:
        return
    wrong = np.asarray(errors_of(step, right).wrong.any(axis=1))
    keys = keys_of_tokens(step.batch)
    rows: set[int] = set()
    for token in np.argsort(keys, kind="stable"):
        if not wrong[token] or not keys[token]:
            continue
        row = row_of(step.batch, int(token))
        if row not in rows:
            rows.add(row)
            yield view_of(step, right, int(token))
        if len(rows) == most:
            return


def row_of(batch: Batch, token: int) -> int:
    """Return the row of a query token."""
    return int(np.searchsorted(batch.cu_seqlens_q, token, side="right")) - 1


def query_of(step: Step, token: int) -> Array:
    """Return one query, rotated if the problem has a rope, float64 [H, R+P]."""
    batch, rope = step.batch, step.problem.rope
    assert batch is not None
    q_pe = widen(batch.q_pe[token : token + 1])
    if rope is not None:
        q_pe = rotate(q_pe, metadata(step.problem, batch).positions[token : token + 1], rope)
    return np.concatenate([widen(batch.q_nope[token]), q_pe[0]], axis=1)


def view_of(step: Step, right: Right, token: int) -> QueryView:
    """Return a query token and the keys of its row (S-4, S-5)."""
    batch, row = step.batch, row_of(step.batch, token) if step.batch is not None else 0
    assert batch is not None
    query = query_of(step, token)
    span = query_spans(batch)[row]
    seen = visibility(step.problem, batch)[row][token - span.start]
    columns = -(-len(seen) // step.problem.block_size)
    blocks = batch.block_table[row, :columns].astype(np.int64)
    scores = scores_of(step, query, blocks)[:, : len(seen)]
    return QueryView(token, row, query, seen, scores, right.exact.lse[token])


def scores_of(step: Step, query: Array, blocks: NDArray[np.int64]) -> Array:
    """Return the scores of every slot of some blocks, float64 [H, blocks * block_size]."""
    assert step.after is not None
    size = step.problem.block_size
    slots = (blocks[:, None] * size + np.arange(size)).ravel()
    keys = read_keys(step.after, slots)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.asarray(step.problem.softmax_scale * (query @ keys.T))
