"""Wrong splits and merges: bases, weights, boundaries, partials that should not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.attention import QueryAnswer, attend_one
from paged_mla_reference.deviations.change import scoring
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rounding import Rounding
from paged_mla_shared.problem import Output, Problem

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


@breaks(Fault.PARTIAL, "S-8", cites="vllm#27491")
def two_empty_partials_are_nan(oracle: Oracle) -> Oracle:
    """-inf minus -inf is not caught."""

    def change(_: Partials, answer: Output) -> Output:
        answer.out[np.isneginf(answer.lse)] = np.nan
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


@breaks(Fault.SPLIT, "S-8")
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


def _with_keys(oracle: Oracle, change: Callable[[Array], Array]) -> Oracle:
    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        return attend_one(problem, query, change(keys), rounding)

    return scoring(oracle, attend)


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_key_between_splits_counts_twice(oracle: Oracle) -> Oracle:
    """Splits of 512 keys share the one at their boundary."""
    return _with_keys(oracle, lambda keys: np.vstack([keys, keys[511:512]]))


@breaks(Fault.SPLIT, "S-5", "S-7", "S-20")
def the_last_split_is_dropped(oracle: Oracle) -> Oracle:
    """Keys past the last full split of 512 are lost, where there is one."""
    return _with_keys(oracle, lambda keys: keys[: max(len(keys) // 512 * 512, 0) or len(keys)])


@breaks(Fault.SPLIT, "S-5", "S-20")
def splits_are_summed_unweighted(oracle: Oracle) -> Oracle:
    """Halves of rows past 256 keys are averaged, whatever they weigh."""

    def attend(problem: Problem, query: Array, keys: Array, rounding: Rounding) -> QueryAnswer:
        whole = attend_one(problem, query, keys, rounding)
        if len(keys) <= 256:
            return whole
        halves = np.array_split(keys, 2)
        outs = [attend_one(problem, query, half, rounding)[0] for half in halves]
        return (outs[0] + outs[1]) / 2, whole[1], whole[2], whole[3]

    return scoring(oracle, attend)
