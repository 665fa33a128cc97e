"""Wrong splits and merges: bases, weights, boundaries, partials that should not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import QueryAnswer, attend_one
from paged_mla_reference.deviations.addressing import as_dense
from paged_mla_reference.deviations.change import (
    answering,
    context_of,
    of_rows,
    only_before,
    scoring,
    seeing,
)
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.paging import query_spans
from paged_mla_reference.rounding import Rounding, round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

Array = NDArray[np.float64]
Partials = Sequence[Output]


def _merging(oracle: Oracle, change: Callable[[Partials], Partials]) -> Oracle:
    """Let a merge take other partials."""
    return replace(oracle, merge=lambda partials: oracle.merge(change(partials)))


def _merged(oracle: Oracle, change: Callable[[Partials, Output], Output]) -> Oracle:
    """Change what a merge answers."""
    return replace(oracle, merge=lambda partials: change(partials, oracle.merge(partials)))


@breaks(Fault.PARTIAL, "S-8", cites="sglang@merge_state_triton vllm#27491")
def empty_partials_are_multiplied_by_zero(oracle: Oracle) -> Oracle:
    """An empty partial is weighed by 0, which NaN survives."""

    def change(partials: Partials, answer: Output) -> Output:
        return Output(answer.out + np.sum([0 * p.out for p in partials], axis=0), answer.lse)

    return _merged(oracle, change)


@breaks(Fault.PARTIAL, "S-8", cites="vllm#27491 flashinfer#4051 vllm#39148")
def two_empty_partials_are_nan(oracle: Oracle) -> Oracle:
    """-inf minus -inf is not caught."""

    def change(_: Partials, answer: Output) -> Output:
        answer.out[np.isneginf(answer.lse)] = np.nan
        return answer

    return _merged(oracle, change)


@breaks(Fault.PARTIAL, "S-8", cites="vllm#28181")
def empty_queries_keep_their_first_partial(oracle: Oracle) -> Oracle:
    """A query that sees nothing anywhere gets what the first partial holds."""

    def change(partials: Partials, answer: Output) -> Output:
        empty = np.isneginf(answer.lse)
        answer.out[empty] = partials[0].out[empty]
        return answer

    return _merged(oracle, change)


@breaks(Fault.PARTIAL, "S-8", akin="vllm#28181")
def a_single_partial_is_copied(oracle: Oracle) -> Oracle:
    """Nobody looks into a partial that comes alone."""

    def change(partials: Partials, answer: Output) -> Output:
        return answer if len(partials) > 1 else Output(partials[0].out.copy(), answer.lse)

    return _merged(oracle, change)


@breaks(Fault.PARTIAL, "S-8", akin="flashinfer#4051")
def a_single_empty_partial_has_no_lse(oracle: Oracle) -> Oracle:
    """-inf minus -inf is not caught in a partial that comes alone."""

    def change(partials: Partials, answer: Output) -> Output:
        if len(partials) == 1:
            answer.lse[np.isneginf(answer.lse)] = np.nan
        return answer

    return _merged(oracle, change)


@breaks(Fault.PARTIAL, "S-8", cites="vllm#49294")
def an_empty_partial_weighs_as_lse_0(oracle: Oracle) -> Oracle:
    """An empty partial takes part with lse 0."""

    def change(partials: Partials) -> Partials:
        return [Output(np.nan_to_num(p.out), np.nan_to_num(p.lse, neginf=0.0)) for p in partials]

    return _merging(oracle, change)


@breaks(Fault.PARTIAL, "S-8", cites="sglang@merge_state_triton")
def a_query_empty_in_one_partial_is_lost(oracle: Oracle) -> Oracle:
    """A query that sees nothing in one partial gets nothing at all."""

    def change(partials: Partials, answer: Output) -> Output:
        lost = np.any([np.isneginf(p.lse) for p in partials], axis=0)
        answer.out[lost], answer.lse[lost] = 0, -np.inf
        return answer

    return _merged(oracle, change)


@breaks(Fault.SPLIT, "S-8", cites="sglang#33064 sglang#34240 vllm#43919")
def merge_takes_lse_for_base_2(oracle: Oracle) -> Oracle:
    """Weights are powers of two."""

    def change(partials: Partials) -> Partials:
        return [Output(p.out, p.lse * np.float32(np.log(2))) for p in partials]

    return _merging(oracle, change)


@breaks(Fault.SPLIT, "S-8", akin="vllm#47188")
def partials_are_averaged(oracle: Oracle) -> Oracle:
    """Partials weigh the same, whatever they saw."""

    def change(partials: Partials, answer: Output) -> Output:
        np.mean([np.nan_to_num(p.out) for p in partials], axis=0, out=answer.out)
        return answer

    return _merged(oracle, change)


@breaks(Fault.SPLIT, "S-8", cites="local-inference-lab/vllm#15 local-inference-lab/vllm#17")
def only_two_partials_are_merged(oracle: Oracle) -> Oracle:
    """Partials past the second are left out."""
    return _merging(oracle, lambda partials: partials[:2])


@breaks(Fault.SPLIT, "S-8")
def partials_past_64_are_left_out(oracle: Oracle) -> Oracle:
    """A table holds the weights of 64 partials."""
    return _merging(oracle, lambda partials: partials[:64])


@breaks(Fault.SPLIT, "S-8", cites="TensorRT-LLM#19112")
def merged_lse_is_the_largest(oracle: Oracle) -> Oracle:
    """The merged lse is that of the heaviest partial."""

    def change(partials: Partials, answer: Output) -> Output:
        np.max(np.stack([p.lse for p in partials]), axis=0, out=answer.lse)
        return answer

    return _merged(oracle, change)


@breaks(Fault.SPLIT, "S-8", cites="cutlass#2274")
def merge_weights_are_not_shifted(oracle: Oracle) -> Oracle:
    """Weights are exponentials of lse itself, in float32."""

    def merge(partials: Partials) -> Output:
        with np.errstate(all="ignore"):
            lses = np.stack([p.lse for p in partials])
            weights = np.exp(lses)
            outs = np.where(np.isneginf(lses)[..., None], 0, [p.out for p in partials])
            total = weights.sum(axis=0)
            out = (weights[..., None] * outs).sum(axis=0) / np.where(total == 0, 1, total)[
                ..., None
            ]
            return Output(out.astype(np.float32), np.log(total).astype(np.float32))

    return replace(oracle, merge=merge)


@breaks(Fault.PRECISION, "S-8", cites="FastDeploy#5541")
def merge_in_half_precision(oracle: Oracle) -> Oracle:
    """Partials are rounded to float16 before they are merged."""

    def change(partials: Partials) -> Partials:
        return [Output(p.out.astype(np.float16).astype(np.float32), p.lse) for p in partials]

    return _merging(oracle, change)


@breaks(Fault.LAYOUT, "S-8", cites="vllm@FLASH_ATTN_MLA")
def merge_reads_lse_as_heads_by_tokens(oracle: Oracle) -> Oracle:
    """The lse of partials is read as [H, T]."""

    def change(partials: Partials) -> Partials:
        return [Output(p.out, np.ascontiguousarray(p.lse.T).reshape(p.lse.shape)) for p in partials]

    return _merging(oracle, change)


@breaks(Fault.STRIDE, "S-8", cites="vllm#21996")
def merge_takes_lse_for_dense(oracle: Oracle) -> Oracle:
    """The strides of lse are ignored: what follows in memory is taken for the next query's."""

    def change(partials: Partials) -> Partials:
        return [Output(p.out, as_dense(p.lse)) for p in partials]

    return _merging(oracle, change)


@breaks(Fault.STRIDE, "S-8", akin="vllm#21996")
def merge_takes_out_for_dense(oracle: Oracle) -> Oracle:
    """The strides of out are ignored, in arrays that are parts of larger ones."""

    def change(partials: Partials) -> Partials:
        return [Output(as_dense(p.out), p.lse) for p in partials]

    return _merging(oracle, change)


def _with_keys(oracle: Oracle, change: Callable[[Array], Array]) -> Oracle:
    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        return attend_one(problem, query, change(keys), rounding)

    return scoring(oracle, attend)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20", cites="vllm-flash-attention#142")
def the_key_between_splits_counts_twice(oracle: Oracle) -> Oracle:
    """Splits of 512 keys share the one at their boundary."""
    return _with_keys(oracle, lambda keys: np.vstack([keys, keys[511:512]]))


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20", akin="flash-attention#1325")
def the_last_split_is_dropped(oracle: Oracle) -> Oracle:
    """Keys past the last full split of 512 are lost, where there is one."""
    return _with_keys(oracle, lambda keys: keys[: max(len(keys) // 512 * 512, 0) or len(keys)])


TILE = 64  # keys of a split, where a row has as many splits as tiles


def _of_splits(oracle: Oracle, count: int, change: Callable[[Array, int], Array]) -> Oracle:
    """Change the keys of queries that see `count` tiles, given where the last tile starts."""

    def changed(keys: Array) -> Array:
        last = (count - 1) * TILE
        return change(keys, last) if last < len(keys) <= last + TILE else keys

    return _with_keys(oracle, changed)


def _dropped(keys: Array, last: int) -> Array:
    return keys[:last]


def _doubled(keys: Array, last: int) -> Array:
    return np.vstack([keys, keys[last:]])


@breaks(Fault.PARTIAL, "S-8", "S-11")
def splits_of_no_numbers_are_empty(oracle: Oracle) -> Oracle:
    """A split whose scores are all NaN has no highest one, and is taken for one without keys."""

    def numbers(keys: Array) -> Array:
        splits = np.split(keys, range(TILE, len(keys), TILE))
        kept = [split for split in splits if not np.isnan(split).any(axis=1).all()]
        return np.vstack(kept) if kept else keys

    return _with_keys(oracle, numbers)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_5_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of five splits leaves out the last."""
    return _of_splits(oracle, 5, _dropped)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_7_splits_counts_twice(oracle: Oracle) -> Oracle:
    """A merge of seven splits takes the last for the missing eighth too."""
    return _of_splits(oracle, 7, _doubled)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_9_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of nine splits ends with the eighth."""
    return _of_splits(oracle, 9, _dropped)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_11_splits_counts_twice(oracle: Oracle) -> Oracle:
    """A merge of eleven splits takes the last again."""
    return _of_splits(oracle, 11, _doubled)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_13_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of thirteen splits ends with the twelfth."""
    return _of_splits(oracle, 13, _dropped)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_of_16_splits_is_dropped(oracle: Oracle) -> Oracle:
    """A merge of sixteen splits ends with the fifteenth."""
    return _of_splits(oracle, 16, _dropped)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20", cites="vllm#47188", akin="TensorRT-LLM#18754")
def empty_splits_are_merged(oracle: Oracle) -> Oracle:
    """Queries that see fewer keys than a tile also merge a split that holds zeros."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        out, lse, scores, values = attend_one(problem, query, keys, rounding)
        if len(keys) >= TILE:
            return out, lse, scores, values
        merged = np.logaddexp(lse, 0.0)
        return out * np.exp(lse - merged)[:, None], merged, scores, values

    return scoring(oracle, attend)


def _in_halves(oracle: Oracle, join: Callable[[QueryAnswer, list[QueryAnswer]], Array]) -> Oracle:
    """Join the answers of both halves of more than 256 keys, given the right one too."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        whole = attend_one(problem, query, keys, rounding)
        if len(keys) <= 256:
            return whole
        halves = [attend_one(problem, query, half, rounding) for half in np.array_split(keys, 2)]
        return join(whole, halves), whole[1], whole[2], whole[3]

    return scoring(oracle, attend)


@breaks(Fault.SPLIT, "S-5", "S-20", akin="attention-gym#205")
def splits_are_summed_unweighted(oracle: Oracle) -> Oracle:
    """Halves of rows past 256 keys are averaged, whatever they weigh."""
    return _in_halves(oracle, lambda _, halves: (halves[0][0] + halves[1][0]) / 2)


@breaks(Fault.PRECISION, "S-5", "S-20", cites="flashinfer#5107")
def split_partials_are_rounded(oracle: Oracle) -> Oracle:
    """Halves of rows past 256 keys are kept in float16 until they are merged."""

    def join(whole: QueryAnswer, halves: list[QueryAnswer]) -> Array:
        outs = [widen(round_to(half[0], "float16")) for half in halves]
        weights = [np.exp(half[1] - whole[1])[:, None] for half in halves]
        return outs[0] * weights[0] + outs[1] * weights[1]

    return _in_halves(oracle, join)


@breaks(
    Fault.SPLIT,
    "S-5",
    "S-6",
    "S-20",
    cites="vllm-flash-attention#176 pytorch#194168",
    akin="FlagGems#5235",
)
def rows_of_several_splits_are_written_over_row_0(oracle: Oracle) -> Oracle:
    """The merge of splits of 256 keys has batch stride 0, so that other rows get nothing."""

    def change(_p: Problem, batch: Batch, answer: Output) -> Output:
        out = answer.out.copy()
        for row, span in enumerate(query_spans(batch)):
            if batch.seq_lens[row] > 256 and span.start:
                out[span] = 0
                out[: span.stop - span.start] = answer.out[span]
        return Output(out, answer.lse)

    return answering(oracle, change)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-8", cites="sglang#40903 sglang#35045 flashinfer#4547")
def chunks_join_their_context_in_another_base(oracle: Oracle) -> Oracle:
    """Rows of several tokens merge their context's base-2 lse with the natural one of the step."""
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
