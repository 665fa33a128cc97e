"""Find rows that use the table, length or output of another row, and stale tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.explain.checks.errors import actual_output, errors_of
from paged_mla_reference.explain.checks.examination import Examination
from paged_mla_reference.explain.checks.query_view import row_of, views_of_wrong
from paged_mla_reference.explain.hypotheses.hypothesis import Hypothesis
from paged_mla_reference.faults.kernel.change import answering, with_batch, with_cache
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.cache import copy_slots, slots_to_write
from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.rules.rounding import widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

_LENGTHS = {"leave out the step's tokens": -1, "count the step's tokens twice": 1}
_ROWS = 3
_OTHERS = 16  # rows nearest to a wrong one
_TOKENS = 64


def faults_of_rows(found: Examination) -> Iterator[Hypothesis]:
    """Return hypotheses in which wrong queries use other rows, lengths, outputs or stale keys."""
    batch = found.step.batch
    if batch is None or found.right is None:
        return
    for what, times in _LENGTHS.items():
        name = f"the rows' lengths {what}"
        yield Hypothesis(name, f"{name}.", _with_lengths(times), ("S-2", "S-4", "S-5"))
    rows = np.arange(batch.num_rows)
    tables = {"row before it": rows - 1, "row after it": rows + 1, "first row": 0 * rows}
    for whose, order in tables.items():
        name = f"every row reads through the table of the {whose}"
        yield Hypothesis(name, f"{name}.", _with_tables_of(order), ("S-1", "S-5"))
    for view in views_of_wrong(found, _ROWS):
        near = np.argsort(np.abs(np.arange(batch.num_rows) - view.row), kind="stable")
        for other in near[1 : _OTHERS + 1].tolist():
            yield from _tables(batch, found.step.problem, view.row, other)
        yield from _answers(found, view.token)
    yield from _places(found)
    yield from _stale_tokens(found)


def _with_lengths(times: int) -> Callable[[Oracle], Oracle]:
    """Return a change that adds `times` the number of its queries to each row's length.

    The queries stay at the end of the row.
    """

    def change(problem: Problem, batch: Batch) -> Batch:
        room = batch.block_table.shape[1] * problem.block_size
        lens = batch.seq_lens + times * batch.query_lens
        return replace(batch, seq_lens=np.clip(lens, 0, room) * (batch.seq_lens > 0))

    return lambda oracle: with_batch(oracle, change)


def _with_tables_of(rows: NDArray[np.int64]) -> Callable[[Oracle], Oracle]:
    """Return a change in which row b reads through the table of row ``rows[b]``, modulo B."""

    def change(problem: Problem, batch: Batch) -> Batch:
        tables = batch.block_table[rows % max(batch.num_rows, 1)]
        return replace(batch, block_table=tables % problem.num_blocks)

    return lambda oracle: with_batch(oracle, change)


def _tables(batch: Batch, problem: Problem, row: int, other: int) -> Iterator[Hypothesis]:
    """Return up to two hypotheses: a row uses the table, or the length, of another row.

    The other row's blocks must suffice for the row. Its length must be at most the row's, and must
    include the row's queries.
    """
    lengths = [int(batch.seq_lens[row]), int(batch.seq_lens[other])]
    have = blocks_of(lengths[1], problem.block_size)
    if blocks_of(lengths[0], problem.block_size) <= have:
        name = f"row {row} reads through the table of row {other}"
        yield Hypothesis(name, f"{name}.", _reading_row(row, other, "block_table"), ("S-1", "S-5"))
    if int(batch.query_lens[row]) <= lengths[1] <= lengths[0]:
        name = f"row {row} takes the length of row {other}"
        yield Hypothesis(name, f"{name}.", _reading_row(row, other, "seq_lens"), ("S-2", "S-5"))


def _reading_row(row: int, other: int, name: str) -> Callable[[Oracle], Oracle]:
    """Return a change in which a row has another row's line of the batch's array `name`."""

    def change(_: Problem, batch: Batch) -> Batch:
        array = getattr(batch, name).copy()
        array[row] = array[other]
        return replace(batch, **{name: array})

    return lambda oracle: with_batch(oracle, change)


def _answers(found: Examination, token: int) -> Iterator[Hypothesis]:
    """Return hypotheses in which a wrong token, or a wrong head, has the output of another.

    The other token, or the other head of the same token, is the one whose right output is nearest.
    """
    step, right = found.step, found.right
    assert right is not None
    assert step.batch is not None
    if not step.has("out"):
        return
    answer = right.rounded.output(step.problem.dtype)
    mine = widen(actual_output(step, answer).out[token])  # [H, R]
    if not np.isfinite(mine).all():
        return
    other = _nearest(right.exact.out, mine)
    if other != token:
        name = f"token {token} has the output of token {other}"
        what = f"{name}; rows {row_of(step.batch, token)} and {row_of(step.batch, other)}."
        yield Hypothesis(name, what, _moving(token, other), ("S-5", "S-7", "S-19"))
    wrong = np.flatnonzero(errors_of(step, right).wrong[token])
    for head in wrong[:2].tolist():
        source = int(np.argmin(np.abs(right.exact.out[token] - mine[head]).max(axis=1)))
        if source != head:
            name = f"head {head} has the output of head {source}"
            yield Hypothesis(name, f"{name}.", _moving_head(head, source), ("S-5", "S-7"))


def _nearest(outs: NDArray[np.float64], out: NDArray[np.float64]) -> int:
    """Return the token of `outs` [T, H, R] whose output is nearest to `out` [H, R]."""
    distances = np.abs(outs - out).max(axis=(1, 2))
    return int(np.argmin(np.where(np.isnan(distances), np.inf, distances)))


def _moving(
    tokens: int | NDArray[np.int64], sources: int | NDArray[np.int64]
) -> Callable[[Oracle], Oracle]:
    """Return a change in which a token, or each of several, has the output of another token."""

    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        answer.out[tokens], answer.lse[tokens] = answer.out[sources], answer.lse[sources]
        return answer

    return lambda oracle: answering(oracle, change)


def _places(found: Examination) -> Iterator[Hypothesis]:
    """Return a hypothesis in which several wrong tokens have the outputs of other tokens."""
    step, right = found.step, found.right
    assert right is not None
    wrong = np.flatnonzero(errors_of(step, right).wrong.any(axis=1))[: _TOKENS + 1]
    if not (step.has("out") and 2 <= len(wrong) <= _TOKENS):
        return
    mine = widen(actual_output(step, right.rounded.output(step.problem.dtype)).out)
    sources = np.arange(len(mine))
    for token in wrong[np.isfinite(mine[wrong]).all(axis=(1, 2))].tolist():
        sources[token] = _nearest(right.exact.out, mine[token])
    moved = np.flatnonzero(sources != np.arange(len(mine)))
    if len(moved) < 2:
        return
    pairs = ", ".join(f"token {token} that of {sources[token]}" for token in moved[:_ROWS])
    name = f"{len(moved)} tokens have the outputs of other tokens: {pairs}"
    name += ", ..." if len(moved) > _ROWS else ""

    yield Hypothesis(name, f"{name}.", _moving(moved, sources[moved]), ("S-5", "S-7", "S-19"))


def _moving_head(head: int, source: int) -> Callable[[Oracle], Oracle]:
    def change(_p: Problem, _b: Batch, answer: Output) -> Output:
        answer.out[:, head], answer.lse[:, head] = answer.out[:, source], answer.lse[:, source]
        return answer

    return lambda oracle: answering(oracle, change)


def _stale_tokens(found: Examination) -> Iterator[Hypothesis]:
    """Return hypotheses in which attention reads the bytes from before the step."""
    step = found.step
    if step.before is None or step.after is None or step.batch is None:
        return
    slots = slots_to_write(step.problem, step.batch)
    written = np.flatnonzero(slots >= 0)
    for token in written[:_TOKENS].tolist():
        name = f"the key of token {token} is read as it was before the step"
        yield Hypothesis(name, f"{name}.", _unwritten(step.before, slots[[token]]), ("S-5", "S-10"))
    name = "the step's keys are read as they were before it"
    yield Hypothesis(name, f"{name}.", _unwritten(step.before, slots[written]), ("S-5", "S-10"))


def _unwritten(before: CacheImage, slots: NDArray[np.int64]) -> Callable[[Oracle], Oracle]:
    """Return a change in which attention reads the earlier bytes of some slots."""
    layout = before.layout

    def change(_p: Problem, _b: Batch, image: CacheImage) -> CacheImage:
        shift = layout.num_blocks  # the old blocks follow the new ones
        beside = replace(
            image,
            layout=replace(layout, num_blocks=2 * shift),
            block_ids=np.concatenate([image.block_ids, before.block_ids + shift]),
            blocks=np.concatenate([image.blocks, before.blocks]),
        )
        return replace(copy_slots(beside, slots + shift * layout.block_size, slots), layout=layout)

    return lambda oracle: with_cache(oracle, change)
