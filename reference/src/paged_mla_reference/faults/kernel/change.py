"""Small changes from which faults are built: oracles with one wrong function, and helpers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.attention import AttendQuery
from paged_mla_reference.rules.masks import decode_mask, spell_mask, visibility
from paged_mla_reference.rules.paging import context_lens
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Output, Problem

Seen = NDArray[np.bool_]  # [query_len, keys] of one row
Matrices = list[NDArray[np.bool_]]  # [query_len, query_len] per row


def with_batch(oracle: Oracle, change: Callable[[Problem, Batch], Batch]) -> Oracle:
    """Return an oracle whose attention uses a changed batch."""
    return replace(
        oracle,
        attend=lambda problem, batch, image: oracle.attend(problem, change(problem, batch), image),
    )


def with_problem(oracle: Oracle, change: Callable[[Problem], Problem]) -> Oracle:
    """Return an oracle whose attention uses a changed problem."""
    return replace(
        oracle,
        attend=lambda problem, batch, image: oracle.attend(change(problem), batch, image),
    )


def with_cache(
    oracle: Oracle, change: Callable[[Problem, Batch, CacheImage], CacheImage]
) -> Oracle:
    """Return an oracle whose attention reads a changed cache."""
    return replace(
        oracle,
        attend=lambda problem, batch, image: oracle.attend(
            problem, batch, change(problem, batch, image)
        ),
    )


def answering(oracle: Oracle, change: Callable[[Problem, Batch, Output], Output]) -> Oracle:
    """Return an oracle with a changed output of attention; the change may write its arrays."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        return change(problem, batch, oracle.attend(problem, batch, image))

    return replace(oracle, attend=attend)


def masked_below_a_sentinel(answer: Output) -> Output:
    """Set out to 0 and lse to -5e4 where the lse is finite and below -5e4, in place."""
    below = (answer.lse < -5e4) & np.isfinite(answer.lse)
    answer.out[below], answer.lse[below] = 0, -5e4
    return answer


def seeing(oracle: Oracle, change: Callable[[Problem, Batch, int, Seen], Seen]) -> Oracle:
    """Return an oracle in which the queries of a row see other keys.

    A matrix with more columns than the row has keys reads past the row's length.
    """

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        visible = [
            change(problem, batch, row, seen) for row, seen in enumerate(visibility(problem, batch))
        ]
        wide = wide_table(batch, problem.block_size, max((s.shape[1] for s in visible), default=0))
        return oracle.attend_visible(problem, wide, image, visible)

    return replace(oracle, attend=attend)


def forgetting(oracle: Oracle, forgotten: Callable[[Batch], NDArray[Any]]) -> Oracle:
    """Return an oracle in which chosen query tokens, indices or bool [T], see no keys."""

    def change(_: Problem, batch: Batch, answer: Output) -> Output:
        chosen = forgotten(batch)
        answer.out[chosen], answer.lse[chosen] = 0, -np.inf
        return answer

    return answering(oracle, change)


def scoring(oracle: Oracle, attend_query: AttendQuery) -> Oracle:
    """Return an oracle in which a query token attends to its keys by `attend_query`."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        visible = visibility(problem, batch)
        return oracle.attend_visible(problem, batch, image, visible, attend_query)

    return replace(oracle, attend=attend)


def masked(oracle: Oracle, change: Callable[[Problem, Batch, Matrices], Matrices]) -> Oracle:
    """Return an oracle in which tree masks are changed; other masks stay unchanged."""

    def other_mask(problem: Problem, batch: Batch) -> Batch:
        if problem.mask is not Mask.TREE:
            return batch
        matrices = change(problem, batch, decode_mask(problem, batch))
        spelt = spell_mask(
            matrices,
            problem.mask_spelling,
            batch.seq_lens,
            problem.max_draft_tokens,
            batch.num_tokens,
        )
        return replace(batch, mask=spelt)

    return with_batch(oracle, other_mask)


def appending(oracle: Oracle, change: Callable[[Problem, Batch], Batch]) -> Oracle:
    """Return an oracle whose append uses a changed batch."""
    return replace(
        oracle,
        append=lambda problem, batch, image: oracle.append(problem, change(problem, batch), image),
    )


def writing(
    oracle: Oracle,
    change: Callable[[Problem, Batch, NDArray[np.int64]], NDArray[np.int64]],
) -> Oracle:
    """Return an oracle whose append writes other slots, int64 [T]."""

    def other_slots(problem: Problem, batch: Batch) -> Batch:
        slots = change(problem, batch, slots_to_write(oracle, problem, batch))
        return replace(batch, slot_mapping=slots)

    return appending(oracle, other_slots)


def slots_to_write(oracle: Oracle, problem: Problem, batch: Batch) -> NDArray[np.int64]:
    """Return the slots that a batch writes, given or derived, as a new array."""
    if batch.slot_mapping is not None:
        return batch.slot_mapping.copy()
    return oracle.metadata(problem, batch).slot_mapping.copy()


def wide_table(batch: Batch, block_size: int, tokens: int) -> Batch:
    """Return the batch with table columns for `tokens` tokens; new entries are -1."""
    missing = -(-tokens // block_size) - batch.block_table.shape[1]
    if missing <= 0:
        return batch
    extra = np.full((batch.num_rows, missing), -1, batch.block_table.dtype)
    return replace(batch, block_table=np.hstack([batch.block_table, extra]))


def by_slot(
    problem: Problem,
    batch: Batch,
    find: Callable[[NDArray[Any], NDArray[np.int64]], NDArray[np.int64]],
) -> tuple[Problem, Batch]:
    """Return the step with blocks of one slot and a table of slots.

    `find` takes a row of the table and token indices, and returns their slots. Slots outside the
    cache are wrapped into it.
    """
    table: NDArray[Any] = np.zeros((batch.num_rows, batch.seq_lens.max(initial=0)), np.int64)
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        table[row, :seq_len] = find(batch.block_table[row], np.arange(seq_len))
    table %= problem.num_blocks * problem.block_size
    return replace(problem, block_size=1), replace(batch, block_table=table)


def with_columns(seen: Seen, keys: int) -> Seen:
    """Return the matrix cut or extended to `keys` columns; all queries see new columns."""
    out = np.ones((len(seen), keys), bool)
    kept = min(keys, seen.shape[1])
    out[:, :kept] = seen[:, :kept]
    return out


def only_before(seen: Seen, end: int) -> Seen:
    """Return the matrix in which keys from `end` on are not visible."""
    out = seen.copy()
    out[:, max(end, 0) :] = False
    return out


def context_of(batch: Batch, row: int) -> int:
    """Return the number of tokens that a row had before the step (S-2)."""
    return int(context_lens(batch)[row])


def of_rows(batch: Batch, chosen: Sequence[bool] | NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return which tokens belong to chosen rows, bool [T]."""
    out = np.zeros(batch.num_tokens, bool)
    live = int(batch.cu_seqlens_q[-1])
    out[:live] = np.repeat(np.asarray(chosen, bool), batch.query_lens)
    return out


def per_token(batch: Batch, of_row: NDArray[Any]) -> NDArray[np.int64]:
    """Repeat a number of each row for each of its tokens, int64 [T]; 0 for padding."""
    out = np.zeros(batch.num_tokens, np.int64)
    out[: int(batch.cu_seqlens_q[-1])] = np.repeat(of_row, batch.query_lens)
    return out
