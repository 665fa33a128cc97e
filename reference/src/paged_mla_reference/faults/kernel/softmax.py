"""Faults of softmax: its maximum, its range and precision, and the lse of some rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel import scores, visibility
from paged_mla_reference.faults.kernel.change import answering, of_rows, scoring
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules import masks
from paged_mla_reference.rules.attention import QueryAnswer, attend_one, weighted_mean
from paged_mla_reference.rules.paging import query_spans
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

Array = NDArray[np.float64]
SCORED = ("S-5", "S-7")
LOST = ("S-5", "S-6", "S-7")  # rules that detect missing outputs
Rows = NDArray[np.bool_]  # [B]
UNDERFLOW = 104  # nats below the largest score from which a weight is 0 in float32


def _in_rows(right: Oracle, wrong: Oracle, chosen: Callable[[Problem, Batch], Rows]) -> Oracle:
    """Return an oracle in which chosen rows get the outputs of a wrong oracle."""

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer, other = (oracle.attend(problem, batch, image) for oracle in (right, wrong))
        tokens = of_rows(batch, chosen(problem, batch))
        answer.out[tokens], answer.lse[tokens] = other.out[tokens], other.lse[tokens]
        return answer

    return replace(right, attend=attend)


def _with_scores(oracle: Oracle, change: Callable[[Array], Array]) -> Oracle:
    """Return an oracle that computes weights from changed scores, [H, K]."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        changed = change(problem.softmax_scale * (query @ keys.T))
        values = keys[:, : problem.dims.kv_lora_rank]
        out, lse = weighted_mean(changed, values, problem.dtype, rounding)
        return out, lse, *attend_one(problem, query, keys, rounding)[2:]

    return scoring(oracle, attend)


def _shifted(oracle: Oracle, shift: Callable[[Array], Array]) -> Oracle:
    """Return an oracle that subtracts `shift(scores)`, [H, 1], instead of the maximum.

    Scores are exponentiated in float32.
    """

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        scores = round_to(problem.softmax_scale * (query @ keys.T), "float32")  # [H, K]
        taken = shift(scores)
        with np.errstate(all="ignore"):
            weights = np.exp(scores - taken)
            total = weights.sum(axis=1)
            out = widen(weights) @ keys[:, : problem.dims.kv_lora_rank] / widen(total)[:, None]
            lse = widen(taken[:, 0] + np.log(total))
        return out, lse, *attend_one(problem, query, keys, rounding)[2:]

    return scoring(oracle, attend)


@kernel_fault(FaultClass.RANGE, *LOST, "S-9", cites="cutlass#2274 sglang#6101")
def exponentials_are_not_shifted(oracle: Oracle) -> Oracle:
    """Scores are exponentiated in float32 without subtracting their maximum."""
    return _shifted(oracle, lambda scores: np.zeros_like(scores[:, :1]))


@kernel_fault(FaultClass.RANGE, *LOST, "S-9")
def the_maximum_is_that_of_the_first_tile(oracle: Oracle) -> Oracle:
    """The maximum of the first 32 keys is subtracted from scores, so that others can overflow."""
    return _shifted(oracle, lambda scores: scores[:, :32].max(axis=1, keepdims=True))


@kernel_fault(FaultClass.RANGE, *SCORED)
def scores_are_clamped_at_800(oracle: Oracle) -> Oracle:
    """Scores above 800 are reduced to 800."""
    return _with_scores(oracle, lambda scores: np.minimum(scores, 800))


@kernel_fault(FaultClass.RANGE, *LOST, through=answering)
def heads_share_a_maximum(_p: Problem, _b: Batch, answer: Output) -> Output:
    """Heads share one maximum: a head with an lse 104 below another's gets an empty output."""
    return _underflowing(answer, answer.lse.max(axis=1, keepdims=True))


@kernel_fault(FaultClass.RANGE, *LOST)
def the_maximum_is_taken_before_the_mask(oracle: Oracle) -> Oracle:
    """The maximum includes masked keys: weights far below it become 0."""
    unmasked = visibility.the_future_is_seen.change(oracle)

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        whole = unmasked.attend(problem, batch, image)
        return _underflowing(oracle.attend(problem, batch, image), whole.lse)

    return replace(oracle, attend=attend)


def _underflowing(answer: Output, highest: NDArray[np.float32]) -> Output:
    """Make outputs empty if their lse is more than UNDERFLOW below `highest`, in place."""
    lost = answer.lse < highest - UNDERFLOW
    answer.out[lost], answer.lse[lost] = 0, -np.inf
    return answer


@kernel_fault(FaultClass.RANGE, *LOST, through=answering)
def unseen_keys_score_a_floor(problem: Problem, batch: Batch, answer: Output) -> Output:
    """A key that a query does not see counts as a key with score -200 and value 0."""
    unseen = np.zeros(batch.num_tokens)
    for span, seen in zip(query_spans(batch), masks.visibility(problem, batch), strict=True):
        unseen[span] = (~seen).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        lse = np.logaddexp(answer.lse, (np.log(unseen) - 200)[:, None])
        kept = np.nan_to_num(np.exp(answer.lse - lse))  # NaN where both are -inf
    out = answer.out * kept[..., None]
    return Output(out.astype(answer.out.dtype), lse.astype(np.float32))


@kernel_fault(FaultClass.SCALE, *SCORED)
def long_chunks_take_the_usual_scale(oracle: Oracle) -> Oracle:
    """For rows of more than 25 queries, the softmax scale is always (N + P) ** -0.5."""
    usual = scores.scale_is_derived_from_the_dims.change(oracle)
    return _in_rows(oracle, usual, lambda _, batch: batch.query_lens > 25)


@kernel_fault(FaultClass.PRECISION, *SCORED)
def scores_of_short_rows_are_in_float16(oracle: Oracle) -> Oracle:
    """In rows of at most 6 queries, scores are rounded to float16."""
    rounded = _with_scores(oracle, lambda scores: widen(round_to(scores, "float16")))
    return _in_rows(oracle, rounded, lambda _, batch: batch.query_lens <= 6)


@kernel_fault(FaultClass.PRECISION, "S-5")
def weights_of_many_pairs_are_in_bfloat16(oracle: Oracle) -> Oracle:
    """In rows of more than 2048 pairs of query and head, weights are rounded to bfloat16."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        _, lse, bound, largest = attend_one(problem, query, keys, rounding)
        weights = np.exp(problem.softmax_scale * (query @ keys.T) - lse[:, None])  # [H, K]
        out = widen(round_to(weights, "bfloat16")) @ keys[:, : problem.dims.kv_lora_rank]
        return out, lse, bound, largest

    def many(problem: Problem, batch: Batch) -> Rows:
        return batch.query_lens * problem.dims.num_heads > 2048

    return _in_rows(oracle, scoring(oracle, attend), many)


@kernel_fault(FaultClass.PRECISION, *SCORED, through=scoring)
def long_rows_are_read_in_float16(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """If a query sees more than 8192 keys, the keys are rounded to float16."""
    read = widen(round_to(keys, "float16")) if len(keys) > 8192 else keys
    return attend_one(problem, query, read, rounding)


@kernel_fault(FaultClass.PRECISION, "S-5", through=answering)
def lse_is_in_float64(_p: Problem, batch: Batch, answer: Output) -> Output:
    """Steps of more than 100 tokens return lse in float64 instead of float32."""
    if batch.num_tokens <= 100:
        return answer
    return Output(answer.out, widen(answer.lse))  # type: ignore[arg-type]  # the wrong type


@kernel_fault(FaultClass.LSE, "S-7", through=scoring)
def lse_of_long_rows_is_in_base_2(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """The lse of a query that sees more than 8192 keys is a base-2 logarithm."""
    out, lse, bound, largest = attend_one(problem, query, keys, rounding)
    return out, lse / np.log(2) if len(keys) > 8192 else lse, bound, largest


@kernel_fault(FaultClass.LSE, "S-7", through=answering)
def a_lone_key_has_no_lse(_p: Problem, batch: Batch, answer: Output) -> Output:
    """The lse of queries of a row with only one key is 0."""
    answer.lse[of_rows(batch, batch.seq_lens == 1)] = 0
    return answer
