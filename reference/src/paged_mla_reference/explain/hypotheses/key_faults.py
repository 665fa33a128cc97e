"""Find keys that a query token wrongly sees or does not see, from its lse.

With the right lse, a key's share of the sum of exponentials is ``exp(s - lse)``. The difference
between the dump's sum and the right sum, for each head, shows which keys are missing or too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.query_view import QueryView, scores_of, views_of_wrong
from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.faults.kernel.change import seeing, with_batch, with_columns
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.problem import Batch, Problem

Array = NDArray[np.float64]
Seen = NDArray[np.bool_]

_QUERIES = 3
_PAST = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64, 128)  # keys past a row's length
_MOST_BLOCKS = 512
_HEADS = 4  # heads in which blocks are compared


def faults_of_keys(found: Examination) -> Iterator[Hypothesis]:
    """Return hypotheses from the lse of wrong queries: other ends, starts, keys or blocks."""
    step = found.step
    lse = step.lse
    for number, view in enumerate(views_of_wrong(found, _QUERIES)):
        if number == 0:
            yield from _longer(step, view)
        if lse is None or not np.isfinite(lse[view.token]).all():
            continue
        with np.errstate(over="ignore", invalid="ignore"):
            excess = np.expm1(lse[view.token].astype(np.float64) - view.lse)  # [H]
            if np.isfinite(excess).all() and np.isfinite(view.scores[:, view.seen]).all():
                yield from _ends(view, excess)
                yield from _single_keys(view, excess)
                yield from _blocks(step, view, excess)


def _closest(predicted: Array, excess: Array) -> int:
    """Return the column of `predicted`, [H, n], that is nearest to the excess of the sum, [H]."""
    far = np.abs(predicted - excess[:, None]).max(axis=0)
    return int(np.argmin(np.where(np.isfinite(far), far, np.inf)))


def _everywhere_or_here(
    row: int, what: str, change: Callable[[Problem, Batch, int, Seen], Seen]
) -> Iterator[Hypothesis]:
    """Return two hypotheses: a change of the visible keys in one row, and in every row."""

    def here(problem: Problem, batch: Batch, other: int, seen: Seen) -> Seen:
        return change(problem, batch, other, seen) if other == row else seen

    for where, changed in ((f"row {row}", here), ("every row", change)):
        name = f"{where} {what}"
        yield Hypothesis(name, f"{name}.", partial(seeing, change=changed), ("S-4", "S-5", "S-7"))


def _longer(step: Step, view: QueryView) -> Iterator[Hypothesis]:
    """Return lengths that are too long, as far as the row's block table reaches."""
    assert step.batch is not None
    room = step.batch.block_table.shape[1] * step.problem.block_size - len(view.seen)
    for extra in _PAST:
        if extra <= room:
            more = f"reads {extra} keys past its length"
            yield from _everywhere_or_here(view.row, more, _with_more(extra))


def _with_more(extra: int) -> Callable[[Problem, Batch, int, Seen], Seen]:
    def change(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
        return with_columns(seen, seen.shape[1] + extra) if seen.size else seen

    return change


def _without(first: int, end: int | None) -> Callable[[Problem, Batch, int, Seen], Seen]:
    """Return a change that hides the keys ``first:end``, which is a slice of the row's keys."""

    def change(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
        out = seen.copy()
        out[:, first:end] = False
        return out

    return change


def _ends(view: QueryView, excess: Array) -> Iterator[Hypothesis]:
    """Return the length, and the first key, whose sum is nearest to the dump's sum."""
    sums = np.cumsum(np.where(view.seen, view.shares, 0.0), axis=1)  # [H, S]
    end = _closest(sums - 1, excess) + 1
    last = int(np.flatnonzero(view.seen)[-1]) + 1
    if end < last:
        lacks = f"lacks its last {last - end} keys"
        yield from _everywhere_or_here(view.row, lacks, _without(end - last, None))
        yield from _everywhere_or_here(view.row, f"ends at key {end}", _without(end, None))
    start = _closest(-sums, excess) + 1
    if start < last:
        yield from _everywhere_or_here(view.row, f"begins at key {start}", _without(0, start))
    yield from _windows(view, sums, excess)


def _windows(view: QueryView, sums: Array, excess: Array) -> Iterator[Hypothesis]:
    """Return missing runs of keys, one for each width; each starts at a multiple of its width."""
    for width in (16, 32, 64, 128, 256, 512, 1024):
        bounds = np.arange(0, len(view.seen), width)
        padded = np.hstack([np.zeros((len(sums), 1)), sums])
        shares = padded[:, np.minimum(bounds + width, len(view.seen))] - padded[:, bounds]
        first = int(bounds[_closest(-shares, excess)])
        lacks = f"lacks keys {first} to {first + width - 1}"
        yield from _everywhere_or_here(view.row, lacks, _without(first, first + width))


def _single_keys(view: QueryView, excess: Array) -> Iterator[Hypothesis]:
    """Return the missing key that explains the dump's sum best."""
    shares = np.where(view.seen, view.shares, np.inf)
    key = _closest(-shares, excess)
    lacks = f"does not see key {key}"
    yield from _everywhere_or_here(view.row, lacks, _without(key, key + 1))


def _blocks(step: Step, view: QueryView, excess: Array) -> Iterator[Hypothesis]:
    """Return other blocks in the row's table whose keys explain the dump's sum best."""
    assert step.batch is not None
    assert step.after is not None
    size, row = step.problem.block_size, view.row
    columns = -(-len(view.seen) // size)
    pad = columns * size - len(view.seen)
    seen = np.pad(view.seen, (0, pad)).reshape(columns, size)
    shares = np.pad(np.where(view.seen, view.shares, 0.0), ((0, 0), (0, pad)))
    missing = shares.reshape(-1, columns, size).sum(axis=2)  # [H, columns]
    others = _near(step, row)
    excess, missing = excess[:_HEADS], missing[:_HEADS]
    found = np.exp(scores_of(step, view.query[:_HEADS], others) - view.lse[:_HEADS, None])
    found = found.reshape(len(found), len(others), size)  # [heads, blocks, size]
    best: list[tuple[float, int, int]] = []
    for column in range(columns):
        gained = found[:, :, seen[column]].sum(axis=2) - missing[:, column, None]
        block = _closest(gained, excess)
        best.append((float(np.abs(gained[:, block] - excess).max()), column, int(others[block])))
    for _, column, block in sorted(best)[:3]:
        own = int(step.batch.block_table[row, column])
        if block != own:
            name = f"row {row} reads block {block} for block {own}, in column {column}"
            yield Hypothesis(name, f"{name}.", _with_block(row, column, block), ("S-1", "S-5"))


def _near(step: Step, row: int) -> NDArray[np.int64]:
    """Return listed blocks: the row's, then their neighbors, neighboring rows', then all others."""
    assert step.batch is not None
    assert step.after is not None
    table = step.batch.block_table[max(row - 1, 0) : row + 2].astype(np.int64)
    own = step.batch.block_table[row].astype(np.int64)
    ordered = np.concatenate([own, own - 1, own + 1, table.ravel(), step.after.block_ids])
    _, first = np.unique(ordered, return_index=True)
    distinct = ordered[np.sort(first)]
    return distinct[np.isin(distinct, step.after.block_ids)][:_MOST_BLOCKS]


def _with_block(row: int, column: int, block: int) -> Callable[[Oracle], Oracle]:
    def change(_: Problem, batch: Batch) -> Batch:
        table = batch.block_table.copy()
        table[row, column] = block
        return replace(batch, block_table=table)

    return lambda oracle: with_batch(oracle, change)
