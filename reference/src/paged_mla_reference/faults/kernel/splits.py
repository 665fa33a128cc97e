"""Faults of splits of a row's keys: boundaries, weights, and splits that should not count."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    answering,
    context_of,
    of_rows,
    only_before,
    scoring,
    seeing,
)
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import blocks_of, query_spans
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

Array = NDArray[np.float64]


def _with_keys(oracle: Oracle, change: Callable[[Array], Array]) -> Oracle:
    """Return an oracle in which a query attends to changed keys, [K, R+P]."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        return attend_one(problem, query, change(keys), rounding)

    return scoring(oracle, attend)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", cites="vllm-flash-attention#142")
def the_key_between_splits_counts_twice(oracle: Oracle) -> Oracle:
    """Two splits of 512 keys both count the key at their boundary."""
    return _with_keys(oracle, lambda keys: np.vstack([keys, keys[511:512]]))


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", akin="flash-attention#1325")
def the_last_split_is_dropped(oracle: Oracle) -> Oracle:
    """In rows of more than 512 keys, keys after the last full split of 512 keys are dropped."""
    return _with_keys(oracle, lambda keys: keys[: len(keys) // 512 * 512 or len(keys)])


TILE = 64  # keys of a split, if a row has as many splits as tiles
SPLIT = 1024  # keys of a split of long rows


def _of_splits(oracle: Oracle, count: int, change: Callable[[Array, int], Array]) -> Oracle:
    """Return an oracle that changes the keys of queries that see `count` tiles.

    `change` takes the keys and the index of the last tile's first key.
    """

    def changed(keys: Array) -> Array:
        last = (count - 1) * TILE
        return change(keys, last) if last < len(keys) <= last + TILE else keys

    return _with_keys(oracle, changed)


def _dropped(keys: Array, last: int) -> Array:
    return keys[:last]


def _doubled(keys: Array, last: int) -> Array:
    return np.vstack([keys, keys[last:]])


@kernel_fault(FaultClass.PARTIAL, "S-8", "S-11", through=_with_keys)
def splits_of_no_numbers_are_empty(keys: Array) -> Array:
    """A split of 64 keys that are all NaN is treated as a split without keys."""
    splits = np.split(keys, range(TILE, len(keys), TILE))
    kept = [split for split in splits if not np.isnan(split).any(axis=1).all()]
    return np.vstack(kept) if kept else keys


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_5_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of five splits omits the last split."""
    return _of_splits(oracle, 5, _dropped)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_7_splits_counts_twice(oracle: Oracle) -> Oracle:
    """A merge of seven splits counts the last split twice."""
    return _of_splits(oracle, 7, _doubled)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_9_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of nine splits omits the last split."""
    return _of_splits(oracle, 9, _dropped)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_11_splits_counts_twice(oracle: Oracle) -> Oracle:
    """A merge of eleven splits counts the last split twice."""
    return _of_splits(oracle, 11, _doubled)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_13_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of thirteen splits omits the last split."""
    return _of_splits(oracle, 13, _dropped)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_16_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of sixteen splits omits the last split."""
    return _of_splits(oracle, 16, _dropped)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", through=_with_keys)
def a_lone_last_split_is_dropped(keys: Array) -> Array:
    """If a row has an odd number of splits of 1024 keys, from 3 on, the last is dropped."""
    splits = blocks_of(len(keys), SPLIT)
    return keys[: (splits - 1) * SPLIT] if splits > 1 and splits % 2 else keys


@kernel_fault(
    FaultClass.SPLIT,
    "S-5",
    "S-7",
    "S-20",
    cites="vllm#47188",
    akin="TensorRT-LLM#18754",
    through=scoring,
)
def empty_splits_are_merged(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """Queries that see fewer than 64 keys also merge an empty split with lse 0 and output 0."""
    out, lse, scores, values = attend_one(problem, query, keys, rounding)
    if len(keys) >= TILE:
        return out, lse, scores, values
    merged = np.logaddexp(lse, 0.0)
    return out * np.exp(lse - merged)[:, None], merged, scores, values


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", through=answering)
def splits_that_a_query_does_not_see_weigh_one_key(
    problem: Problem, batch: Batch, answer: Output
) -> Output:
    """A split of 1024 keys that a query does not see counts as one key of score 0 and value 0."""
    for span, seen in zip(query_spans(batch), visibility(problem, batch), strict=True):
        starts = np.arange(0, seen.shape[1], SPLIT)
        unseen = np.sum(~np.logical_or.reduceat(seen, starts, axis=1), axis=1)  # [q]
        tokens = span.start + np.flatnonzero(unseen)
        merged = np.logaddexp(answer.lse[tokens], np.log(unseen[unseen > 0])[:, None])
        answer.out[tokens] *= np.exp(answer.lse[tokens] - merged)[..., None]
        answer.lse[tokens] = merged
    return answer


def _by_splits(oracle: Oracle, join: Callable[[Array, Array], tuple[Array, Array]]) -> Oracle:
    """Return an oracle that merges splits of 1024 keys by another function.

    `join` takes the partial results, out [n, H, R] and lse [n, H].
    """

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        whole = attend_one(problem, query, keys, rounding)
        if len(keys) <= SPLIT:
            return whole
        splits = np.split(keys, range(SPLIT, len(keys), SPLIT))
        answers = [attend_one(problem, query, split, rounding) for split in splits]
        out, lse = join(np.stack([a[0] for a in answers]), np.stack([a[1] for a in answers]))
        return out, lse, whole[2], whole[3]

    return scoring(oracle, attend)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", through=_by_splits)
def light_splits_are_skipped(outs: Array, lses: Array) -> tuple[Array, Array]:
    """A split of 1024 keys is omitted if its lse is more than 3 below the highest lse."""
    highest = lses.max(axis=0)
    weights = np.where(lses < highest - 3, 0, np.exp(lses - highest))
    total = weights.sum(axis=0)
    out = (outs * weights[..., None]).sum(axis=0) / total[:, None]
    return out, highest + np.log(total)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-7", "S-20", through=_by_splits)
def small_rises_are_not_rescaled(outs: Array, lses: Array) -> tuple[Array, Array]:
    """If a split of 1024 keys raises the maximum by at most 6, earlier sums are not rescaled."""
    out, highest, total = outs[0], lses[0], np.ones_like(lses[0])
    for split, lse in zip(outs[1:], lses[1:], strict=True):
        rise = np.maximum(lse - highest, 0)
        highest = highest + rise
        scale = np.where(rise > 6, np.exp(-rise), 1)
        weight = np.exp(lse - highest)
        out = out * scale[:, None] + split * weight[:, None]
        total = total * scale + weight
    return out / total[:, None], highest + np.log(total)


def _in_halves(
    oracle: Oracle, join: Callable[[QueryAnswer, list[QueryAnswer]], Array], *, past: int = 256
) -> Oracle:
    """Return an oracle that merges the two halves of more than `past` keys by `join`.

    `join` takes the right result and the results of both halves, and returns out.
    """

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        whole = attend_one(problem, query, keys, rounding)
        if len(keys) <= past:
            return whole
        halves = [attend_one(problem, query, half, rounding) for half in np.array_split(keys, 2)]
        return join(whole, halves), whole[1], whole[2], whole[3]

    return scoring(oracle, attend)


@kernel_fault(FaultClass.SPLIT, "S-5", "S-20", akin="attention-gym#205")
def splits_are_summed_unweighted(oracle: Oracle) -> Oracle:
    """If a query sees more than 256 keys, the results of two halves are averaged unweighted."""
    return _in_halves(oracle, lambda _, halves: (halves[0][0] + halves[1][0]) / 2)


@kernel_fault(FaultClass.PRECISION, "S-5", "S-20", cites="flashinfer#5107")
def split_partials_are_rounded(oracle: Oracle) -> Oracle:
    """If a query sees more than 256 keys, partial results are rounded to float16."""
    return _in_halves(oracle, _of_rounded_halves)


def _of_rounded_halves(whole: QueryAnswer, halves: list[QueryAnswer]) -> Array:
    """Return the merged out of two halves, each rounded to float16."""
    outs = [widen(round_to(half[0], "float16")) for half in halves]
    weights = [np.exp(half[1] - whole[1])[:, None] for half in halves]
    return outs[0] * weights[0] + outs[1] * weights[1]


@kernel_fault(FaultClass.PRECISION, "S-5", "S-20")
def partials_of_many_pairs_are_rounded(oracle: Oracle) -> Oracle:
    """In rows of more than 512 pairs, the halves of over 1024 keys are rounded to float16."""
    rounded = _in_halves(oracle, _of_rounded_halves, past=SPLIT)

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer = oracle.attend(problem, batch, image)
        many = of_rows(batch, batch.query_lens * problem.dims.num_heads > 512)
        if many.any():
            answer.out[many] = rounded.attend(problem, batch, image).out[many]
        return answer

    return replace(oracle, attend=attend)


@kernel_fault(
    FaultClass.SPLIT,
    "S-5",
    "S-6",
    "S-20",
    cites="vllm-flash-attention#176 pytorch#194168",
    akin="FlagGems#5235",
    through=answering,
)
def rows_of_several_splits_are_written_over_row_0(
    _p: Problem, batch: Batch, answer: Output
) -> Output:
    """Rows of more than 256 keys write their output over row 0, and get an output of 0."""
    out = answer.out.copy()
    for row, span in enumerate(query_spans(batch)):
        if batch.seq_lens[row] > 256 and span.start:
            out[span] = 0
            out[: span.stop - span.start] = answer.out[span]
    return Output(out, answer.lse)


@kernel_fault(
    FaultClass.SPLIT, "S-5", "S-7", "S-8", cites="sglang#40903 sglang#35045 flashinfer#4547"
)
def chunks_join_their_context_in_another_base(oracle: Oracle) -> Oracle:
    """In rows of several tokens, the context's lse is in base 2 and the step's in nats."""
    context = seeing(oracle, lambda _, b, row, seen: only_before(seen, context_of(b, row)))
    own = seeing(
        oracle, lambda _, b, row, seen: seen & (np.arange(seen.shape[1]) >= context_of(b, row))
    )

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer = oracle.attend(problem, batch, image)
        cached, fresh = (part.attend(problem, batch, image) for part in (context, own))
        joined = RIGHT.merge(
            [
                Output(cached.out.astype(np.float32), cached.lse / np.float32(np.log(2))),
                Output(fresh.out.astype(np.float32), fresh.lse),
            ]
        )
        chosen = of_rows(batch, batch.query_lens > 1)
        answer.out[chosen], answer.lse[chosen] = joined.out[chosen], joined.lse[chosen]
        return answer

    return replace(oracle, attend=attend)
