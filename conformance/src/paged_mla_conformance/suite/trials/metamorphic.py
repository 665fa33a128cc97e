"""Metamorphic variants of a step: every query token must keep its output (S-19, S-20)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.suite.trials.trial import Stage
from paged_mla_reference.rules.paging import NO_SLOT, blocks_of, context_lens
from paged_mla_shared.inputs import INT32_MAX, Step
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Problem, cu_seqlens_of


@dataclass(frozen=True)
class Form:
    """A variant of a step.

    Parameters
    ----------
    step : Step
        The variant.
    tokens : int64 [n]
        For each query token of the variant, the token of the original step.
    out_factor : float
        The factor by which ``out`` of the variant is larger, a power of two.
    """

    step: Step
    tokens: NDArray[np.int64]
    out_factor: float = 1.0


def relabelled_blocks(step: Step) -> Form:
    """Return the step with another id for every block."""
    problem, batch = step.problem, step.batch
    ids = np.arange(problem.num_blocks)[::-1].astype(np.int32)
    known = (batch.block_table >= 0) & (batch.block_table < problem.num_blocks)
    table = batch.block_table.copy()
    table[known] = ids[batch.block_table[known]]
    return Form(replace(step, batch=replace(batch, block_table=table)), _every(batch))


def other_block_size(step: Step) -> Form:
    """Return the step with blocks of 16 tokens."""
    needed = [blocks_of(n, 16) for n in step.batch.seq_lens.tolist()]
    problem = replace(step.problem, block_size=16, num_blocks=sum(needed) + 3)
    table = np.full((len(needed), max(needed) + 2), INT32_MAX, np.int32)
    ids = np.random.default_rng(16).permutation(problem.num_blocks)
    for row, count in enumerate(needed):
        table[row, :count], ids = ids[:count], ids[count:]
    batch = replace(step.batch, block_table=table)
    return Form(replace(step, problem=problem, batch=batch), _every(batch))


def permuted_requests(step: Step) -> Form:
    """Return the step with its rows in reverse order."""
    return of_rows(step, np.arange(step.batch.num_rows)[::-1])


def no_batch_mates(step: Step) -> Form:
    """Return the step with only its second row."""
    return of_rows(step, np.array([1]))


def scaled_queries(step: Step) -> Form:
    """Return the step with doubled queries and half the softmax scale."""
    batch, problem = step.batch, step.problem
    doubled = replace(batch, q_nope=batch.q_nope * 2, q_pe=batch.q_pe * 2)
    halved = replace(problem, softmax_scale=problem.softmax_scale / 2)
    return Form(replace(step, problem=halved, batch=doubled), _every(batch))


def scaled_latents(step: Step) -> Form:
    """Return the step with doubled latents and half their queries; its outputs double."""
    batch = step.batch
    half = batch.q_nope.dtype.type(0.5)
    scaled = replace(batch, q_nope=batch.q_nope * half, ckv=batch.ckv * 2)
    doubled = replace(step, batch=scaled, context_ckv=step.context_ckv * 2)
    return Form(doubled, _every(batch), out_factor=2.0)


FORMS: tuple[Callable[[Step], Form], ...] = (
    relabelled_blocks,
    other_block_size,
    permuted_requests,
    no_batch_mates,
    scaled_queries,
    scaled_latents,
)


def halves(stage: Stage) -> tuple[Problem, list[Batch]]:
    """Return two batches over the first and the second part of the keys of each query token.

    Each query token of the causal step becomes a row. Both batches read the cache after the append.
    The cut is at a block edge. The second row of a query token that sees one block has length 0.

    Returns
    -------
    tuple of Problem and list of Batch
        The problem with enough rows, and the two batches.
    """
    batch, size = stage.batch, stage.problem.block_size
    rows = np.repeat(np.arange(batch.num_rows), batch.query_lens)
    first = np.repeat(context_lens(batch), batch.query_lens)
    index = np.concatenate([np.arange(n) for n in batch.query_lens])
    lengths = first + index + 1  # keys that each query token sees
    before = np.maximum(lengths // size // 2, 1) * size
    cuts = np.minimum(before, lengths)
    parts = []
    for start, stop in ((np.zeros_like(cuts), cuts), (cuts, lengths)):
        table = np.full((len(rows), batch.block_table.shape[1]), INT32_MAX, np.int32)
        for token, row in enumerate(rows.tolist()):
            used = batch.block_table[row, start[token] // size : blocks_of(int(stop[token]), size)]
            table[token, : len(used)] = used
        part = replace(
            batch,
            cu_seqlens_q=np.arange(len(rows) + 1, dtype=np.int32),
            seq_lens=(stop - start).astype(np.int32),
            block_table=table,
            slot_mapping=np.full(batch.num_tokens, NO_SLOT, np.int64),
        )
        parts.append(part)
    return replace(stage.problem, max_rows=len(rows)), parts


def _every(batch: Batch) -> NDArray[np.int64]:
    return np.arange(batch.num_tokens)


def of_rows(step: Step, rows: NDArray[np.int64]) -> Form:
    """Return the step with only these rows, in this order, without padded tokens."""
    batch = step.batch
    tokens = _of_spans(batch.cu_seqlens_q, rows)
    keys = _of_spans(np.concatenate([[0], np.cumsum(context_lens(batch))]), rows)
    mask = batch.mask
    if mask is not None:
        trees = np.split(mask, np.cumsum(batch.query_lens.astype(np.int64) ** 2)[:-1])
        mask = np.concatenate([trees[row] for row in rows])
    chosen = replace(
        batch,
        mask=mask,
        cu_seqlens_q=cu_seqlens_of(batch.query_lens[rows]),
        seq_lens=batch.seq_lens[rows],
        block_table=batch.block_table[rows],
        q_nope=batch.q_nope[tokens],
        q_pe=batch.q_pe[tokens],
        ckv=batch.ckv[tokens],
        k_pe=batch.k_pe[tokens],
    )
    context_ckv, context_k_pe = step.context_ckv[keys], step.context_k_pe[keys]
    some = replace(step, batch=chosen, context_ckv=context_ckv, context_k_pe=context_k_pe)
    return Form(some, tokens)


def of_prefill_rows(
    batch: PrefillBatch, rows: NDArray[np.int64]
) -> tuple[PrefillBatch, NDArray[np.int64]]:
    """Return the prefill with only these rows, in this order, and its query tokens in `batch`."""
    tokens = _of_spans(batch.cu_seqlens_q, rows)
    keys = _of_spans(batch.cu_seqlens_k, rows)
    chosen = replace(
        batch,
        cu_seqlens_q=cu_seqlens_of(batch.query_lens[rows]),
        cu_seqlens_k=cu_seqlens_of(batch.seq_lens[rows]),
        q_nope=batch.q_nope[tokens],
        q_pe=batch.q_pe[tokens],
        k_nope=batch.k_nope[keys],
        k_pe=batch.k_pe[keys],
        v=batch.v[keys],
    )
    return chosen, tokens


def arrangements(batch: Batch | PrefillBatch) -> dict[str, NDArray[np.int64]]:
    """Return arrangements of the rows of `batch`: row numbers, by a description (S-20)."""
    rows = np.flatnonzero(batch.seq_lens)
    if len(rows) == 0:
        return {}
    chosen = {*rows[:2].tolist(), int(batch.seq_lens.argmax()), *rows[-2:].tolist()}
    alone = {f"row {row} alone": np.array([row]) for row in sorted(chosen)}
    return alone | {
        "reversed, no padding": rows[::-1],
        "without the longest": np.delete(np.arange(batch.num_rows), batch.seq_lens.argmax()),
    }


def _of_spans(cu_seqlens: NDArray[np.integer[Any]], rows: NDArray[np.int64]) -> NDArray[np.int64]:
    spans = [np.arange(cu_seqlens[row], cu_seqlens[row + 1], dtype=np.int64) for row in rows]
    return np.concatenate([np.zeros(0, np.int64), *spans])
