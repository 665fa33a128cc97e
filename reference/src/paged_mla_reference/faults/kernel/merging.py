"""Faults of merges: bases, weights, and partial results that should not count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.addressing import as_dense
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.problem import Output

Partials = Sequence[Output]


def _merging(oracle: Oracle, change: Callable[[Partials], Partials]) -> Oracle:
    """Return an oracle whose merge takes changed partial results."""
    return replace(oracle, merge=lambda partials: oracle.merge(change(partials)))


def _merged(oracle: Oracle, change: Callable[[Partials, Output], Output]) -> Oracle:
    """Return an oracle with a changed output of merges."""
    return replace(oracle, merge=lambda partials: change(partials, oracle.merge(partials)))


@kernel_fault(
    FaultClass.PARTIAL, "S-8", cites="sglang@merge_state_triton vllm#27491", through=_merged
)
def empty_partials_are_multiplied_by_zero(partials: Partials, answer: Output) -> Output:
    """An empty partial result is multiplied by weight 0, so that its NaN stays."""
    return Output(answer.out + np.sum([0 * p.out for p in partials], axis=0), answer.lse)


@kernel_fault(
    FaultClass.PARTIAL, "S-8", cites="vllm#27491 flashinfer#4051 vllm#39148", through=_merged
)
def two_empty_partials_are_nan(_: Partials, answer: Output) -> Output:
    """If all partial results are empty, -inf minus -inf makes the output NaN."""
    answer.out[np.isneginf(answer.lse)] = np.nan
    return answer


@kernel_fault(FaultClass.PARTIAL, "S-8", cites="vllm#28181", through=_merged)
def empty_queries_keep_their_first_partial(partials: Partials, answer: Output) -> Output:
    """If all partial results are empty, the output is that of the first one instead of 0."""
    empty = np.isneginf(answer.lse)
    answer.out[empty] = partials[0].out[empty]
    return answer


@kernel_fault(FaultClass.PARTIAL, "S-8", akin="vllm#28181", through=_merged)
def a_single_partial_is_copied(partials: Partials, answer: Output) -> Output:
    """A single partial result is copied, even if it is empty and its output is not 0."""
    return answer if len(partials) > 1 else Output(partials[0].out.copy(), answer.lse)


@kernel_fault(FaultClass.PARTIAL, "S-8", akin="flashinfer#4051", through=_merged)
def a_single_empty_partial_has_no_lse(partials: Partials, answer: Output) -> Output:
    """The lse of a single empty partial result becomes NaN, by -inf minus -inf."""
    if len(partials) == 1:
        answer.lse[np.isneginf(answer.lse)] = np.nan
    return answer


@kernel_fault(FaultClass.PARTIAL, "S-8", cites="vllm#49294", through=_merging)
def an_empty_partial_weighs_as_lse_0(partials: Partials) -> Partials:
    """An empty partial result is merged with lse 0 instead of -inf."""
    return [Output(np.nan_to_num(p.out), np.nan_to_num(p.lse, neginf=0.0)) for p in partials]


@kernel_fault(FaultClass.PARTIAL, "S-8", cites="sglang@merge_state_triton", through=_merged)
def a_query_empty_in_one_partial_is_lost(partials: Partials, answer: Output) -> Output:
    """If one partial result of a query is empty, the merged result is empty."""
    lost = np.any([np.isneginf(p.lse) for p in partials], axis=0)
    answer.out[lost], answer.lse[lost] = 0, -np.inf
    return answer


@kernel_fault(
    FaultClass.SPLIT, "S-8", cites="sglang#33064 sglang#34240 vllm#43919", through=_merging
)
def merge_takes_lse_for_base_2(partials: Partials) -> Partials:
    """The lse of partial results is treated as base 2, so that weights are powers of two."""
    return [Output(p.out, p.lse * np.float32(np.log(2))) for p in partials]


@kernel_fault(FaultClass.SPLIT, "S-8", akin="vllm#47188", through=_merged)
def partials_are_averaged(partials: Partials, answer: Output) -> Output:
    """Partial results are averaged with equal weights."""
    np.mean([np.nan_to_num(p.out) for p in partials], axis=0, out=answer.out)
    return answer


@kernel_fault(
    FaultClass.SPLIT, "S-8", cites="local-inference-lab/vllm#15 local-inference-lab/vllm#17"
)
def only_two_partials_are_merged(oracle: Oracle) -> Oracle:
    """Only the first two partial results are merged."""
    return _merging(oracle, lambda partials: partials[:2])


@kernel_fault(FaultClass.SPLIT, "S-8")
def partials_past_64_are_left_out(oracle: Oracle) -> Oracle:
    """Only the first 64 partial results are merged."""
    return _merging(oracle, lambda partials: partials[:64])


@kernel_fault(FaultClass.SPLIT, "S-8", cites="TensorRT-LLM#19112", through=_merged)
def merged_lse_is_the_largest(partials: Partials, answer: Output) -> Output:
    """The merged lse is the largest lse of the partial results."""
    np.max(np.stack([p.lse for p in partials]), axis=0, out=answer.lse)
    return answer


@kernel_fault(FaultClass.SPLIT, "S-8", cites="cutlass#2274")
def merge_weights_are_not_shifted(oracle: Oracle) -> Oracle:
    """Weights are exp(lse) in float32, without subtracting the largest lse."""
    return replace(
        oracle, merge=lambda partials: _weighed_against(np.zeros((), np.float32), partials)
    )


def _weighed_against(base: NDArray[np.float32], partials: Partials) -> Output:
    """Return a merge in float32 whose weights are ``exp(lse - base)``."""
    with np.errstate(all="ignore"):
        lses = np.stack([p.lse for p in partials])
        weights = np.exp(lses - base)
        outs = np.where(np.isneginf(lses)[..., None], 0, [p.out for p in partials])
        total = weights.sum(axis=0)
        out = (weights[..., None] * outs).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
        return Output(out.astype(np.float32), base + np.log(total))


@kernel_fault(FaultClass.SPLIT, "S-8", through=_merged)
def merge_weights_are_shifted_by_the_first(partials: Partials, _: Output) -> Output:
    """Weights are relative to the lse of the first partial result that is not empty."""
    base = partials[0].lse
    for partial in partials[1:]:
        base = np.where(np.isneginf(base), partial.lse, base)
    return _weighed_against(np.where(np.isneginf(base), np.float32(0), base), partials)


@kernel_fault(FaultClass.PRECISION, "S-8", cites="FastDeploy#5541", through=_merging)
def merge_in_half_precision(partials: Partials) -> Partials:
    """Partial results are rounded to float16 before they are merged."""
    return [Output(p.out.astype(np.float16).astype(np.float32), p.lse) for p in partials]


@kernel_fault(FaultClass.LAYOUT, "S-8", cites="vllm@FLASH_ATTN_MLA", through=_merging)
def merge_reads_lse_as_heads_by_tokens(partials: Partials) -> Partials:
    """The lse of partial results is stored as [H, T] and read as [T, H]."""
    return [Output(p.out, np.ascontiguousarray(p.lse.T).reshape(p.lse.shape)) for p in partials]


@kernel_fault(FaultClass.STRIDE, "S-8", cites="vllm#21996", through=_merging)
def merge_takes_lse_for_dense(partials: Partials) -> Partials:
    """The strides of lse are ignored, as if it were contiguous."""
    return [Output(p.out, as_dense(p.lse)) for p in partials]


@kernel_fault(FaultClass.STRIDE, "S-8", akin="vllm#21996", through=_merging)
def merge_takes_out_for_dense(partials: Partials) -> Partials:
    """The strides of out are ignored, as if it were contiguous."""
    return [Output(as_dense(p.out), p.lse) for p in partials]


@kernel_fault(FaultClass.SPLIT, "S-8")
def tied_partials_count_once(oracle: Oracle) -> Oracle:
    """If several partial results have the largest lse, only the first of them is merged."""

    def change(partials: Partials, _: Output) -> Output:
        lses = np.stack([p.lse for p in partials])
        highest = lses == lses.max(axis=0)
        again = highest & (highest.cumsum(axis=0) > 1)
        return oracle.merge([_without(p, a) for p, a in zip(partials, again, strict=True)])

    return _merged(oracle, change)


def _without(partial: Output, chosen: NDArray[np.bool_]) -> Output:
    """Return a partial result that is also empty where `chosen`, bool [T, H] or [T, 1], is true."""
    return Output(partial.out, np.where(chosen, np.float32(-np.inf), partial.lse))


@kernel_fault(FaultClass.PARTIAL, "S-8", through=_merging)
def a_partial_is_empty_where_its_first_head_is(partials: Partials) -> Partials:
    """A partial result that is empty for a token's first head is omitted for all its heads."""
    return [_without(p, np.isneginf(p.lse[:, :1])) for p in partials]


@kernel_fault(FaultClass.PARTIAL, "S-8")
def partials_of_low_lse_are_empty(oracle: Oracle) -> Oracle:
    """Partial results with an lse below -100 are treated as empty."""
    return _merging(oracle, lambda partials: [_without(p, p.lse < -100) for p in partials])


@kernel_fault(FaultClass.LAYOUT, "S-8")
def merges_weigh_heads_by_those_of_the_first_16(oracle: Oracle) -> Oracle:
    """The weights of head h are computed from the lse of head h modulo 16."""

    def change(partials: Partials, answer: Output) -> Output:
        heads = np.arange(answer.lse.shape[1]) % 16
        wrong = oracle.merge([Output(p.out, p.lse[:, heads]) for p in partials])
        return Output(wrong.out, answer.lse)

    return _merged(oracle, change)


@kernel_fault(FaultClass.TRUNCATED, "S-8", through=_merged)
def merges_end_at_512_tokens(partials: Partials, answer: Output) -> Output:
    """Tokens after the first 512 get the first partial result instead of the merged one."""
    answer.out[512:], answer.lse[512:] = partials[0].out[512:], partials[0].lse[512:]
    return answer


@kernel_fault(FaultClass.PARTIAL, "S-8", "S-10", through=_merged)
def merges_write_their_inputs(partials: Partials, answer: Output) -> Output:
    """A merge of two partial results is also written into the arrays of the first one."""
    if len(partials) == 2:
        partials[0].out[...], partials[0].lse[...] = answer.out, answer.lse
    return answer
