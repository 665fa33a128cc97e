"""Faults of numbers: scales, lse, ranges, precision and layouts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    answering,
    appending,
    masked_below_a_sentinel,
    of_rows,
    scoring,
    with_batch,
    with_problem,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.attention import QueryAnswer, attend_one
from paged_mla_reference.rules.e4m3 import decode, encode
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.problem import Batch, Output, Problem

Array = NDArray[np.float64]
SCORED = ("S-5", "S-7")


@kernel_fault(
    FaultClass.SCALE,
    *SCORED,
    cites="sglang#26203 ollama#13893 Megatron-LM#1429 maxtext#1370 mobius#548",
)
def scale_of_the_absorbed_width(oracle: Oracle) -> Oracle:
    """The softmax scale is (R + P) ** -0.5."""
    return with_problem(oracle, lambda p: replace(p, softmax_scale=p.dims.cached_dim**-0.5))


@kernel_fault(FaultClass.SCALE, *SCORED, cites="sglang#26203")
def scale_is_omitted(oracle: Oracle) -> Oracle:
    """The softmax scale is 1."""
    return with_problem(oracle, lambda p: replace(p, softmax_scale=1.0))


@kernel_fault(FaultClass.SCALE, *SCORED, cites="maxtext#3138")
def scale_is_applied_twice(oracle: Oracle) -> Oracle:
    """The softmax scale is applied twice."""
    return with_problem(oracle, lambda p: replace(p, softmax_scale=p.softmax_scale**2))


@kernel_fault(
    FaultClass.SCALE,
    *SCORED,
    cites="TensorRT-LLM#19112 maxtext#3138 transformers#47435 Megatron-LM#3698 aiter#5405",
)
def scale_is_derived_from_the_dims(oracle: Oracle) -> Oracle:
    """The softmax scale is always (N + P) ** -0.5; the caller's scale is ignored."""
    return with_problem(
        oracle,
        lambda p: replace(
            p, softmax_scale=(p.dims.qk_nope_head_dim + p.dims.qk_rope_head_dim) ** -0.5
        ),
    )


@kernel_fault(FaultClass.SCALE, *SCORED, "S-19", akin="Megatron-LM#3698 aiter#5405")
def scale_is_picked_from_a_list(oracle: Oracle) -> Oracle:
    """Only the softmax scales 0.3 and 1 are used; any other becomes (N + P) ** -0.5."""

    def picked(problem: Problem) -> float:
        width = problem.dims.qk_nope_head_dim + problem.dims.qk_rope_head_dim
        built = problem.softmax_scale in {0.3, 1.0}
        return problem.softmax_scale if built else width**-0.5

    return with_problem(oracle, lambda p: replace(p, softmax_scale=picked(p)))


@kernel_fault(FaultClass.SCALE, *SCORED)
def small_scales_are_raised(oracle: Oracle) -> Oracle:
    """Softmax scales below 0.01 are raised to 0.01."""
    return with_problem(oracle, lambda p: replace(p, softmax_scale=max(p.softmax_scale, 0.01)))


@kernel_fault(FaultClass.SCALE, *SCORED)
def large_scales_are_cut(oracle: Oracle) -> Oracle:
    """Softmax scales above 2 are reduced to 2."""
    return with_problem(oracle, lambda p: replace(p, softmax_scale=min(p.softmax_scale, 2.0)))


@kernel_fault(FaultClass.SCALE, *SCORED, akin="mobius#548", through=with_batch)
def rope_part_is_not_scaled(problem: Problem, batch: Batch) -> Batch:
    """The softmax scale is not applied to the rotated part of scores."""
    return replace(batch, q_pe=round_to(widen(batch.q_pe) / problem.softmax_scale, "float32"))


def _scale_of_plain_cache(problem: Problem) -> float:
    """Return the layer's scale if the cache format has no scales, and 1 otherwise."""
    return problem.cache_scale if problem.layout.format.is_plain else 1.0


@kernel_fault(FaultClass.SCALE, *SCORED, cites="vllm#37054 sglang#18396")
def plain_caches_take_a_k_scale(oracle: Oracle) -> Oracle:
    """The layer's scale is applied to keys although the cache format has no scales."""
    return with_problem(
        oracle, lambda p: replace(p, softmax_scale=p.softmax_scale * _scale_of_plain_cache(p))
    )


@kernel_fault(FaultClass.SCALE, "S-5", cites="vllm#37054")
def plain_caches_take_a_v_scale(oracle: Oracle) -> Oracle:
    """The layer's scale is applied to values although the cache format has no scales."""
    return answering(
        oracle,
        lambda p, _, a: Output(a.out * a.out.dtype.type(_scale_of_plain_cache(p)), a.lse),
    )


@kernel_fault(FaultClass.SCALE, "S-10", cites="sglang#34765 sglang#28144")
def plain_caches_are_written_scaled(oracle: Oracle) -> Oracle:
    """The append divides latents by the layer's scale although the cache format has no scales."""
    return appending(
        oracle, lambda p, b: replace(b, ckv=b.ckv / b.ckv.dtype.type(_scale_of_plain_cache(p)))
    )


@kernel_fault(FaultClass.SCALE, *SCORED, cites="flashinfer#3106", through=scoring)
def short_rows_take_another_kernel(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """For queries that see fewer than 16 keys, the softmax scale is 1."""
    scale = 1.0 if len(keys) < 16 else problem.softmax_scale
    return attend_one(replace(problem, softmax_scale=scale), query, keys, rounding)


@kernel_fault(FaultClass.STRIDE, "S-5", cites="ik_llama.cpp#2031", through=scoring)
def values_are_as_wide_as_keys(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """Values are the last R columns of a key, which include its rotated part."""
    _, lse, scores, values = attend_one(problem, query, keys, rounding)
    width = problem.dims.kv_lora_rank
    moved = attend_one(
        problem, np.roll(query, width, axis=1), np.roll(keys, width, axis=1), rounding
    )
    return moved[0], lse, scores, values


@kernel_fault(FaultClass.LSE, "S-7", cites="vllm#28840 vllm#43919 vllm#47079")
def lse_in_base_2(oracle: Oracle) -> Oracle:
    """The lse is a base-2 logarithm."""
    return answering(oracle, lambda _p, _b, a: Output(a.out, a.lse / np.float32(np.log(2))))


@kernel_fault(FaultClass.LSE, "S-7", through=scoring)
def lse_of_low_scores_is_the_highest(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """If the highest score is below -3, the lse is the highest score."""
    out, lse, bounds, values = attend_one(problem, query, keys, rounding)
    highest = (problem.softmax_scale * (query @ keys.T)).max(axis=1)  # [H]
    return out, np.where(highest < -3, highest, lse), bounds, values


@kernel_fault(
    FaultClass.LSE, "S-7", cites="sglang#40903 sglang#35045 vllm#52796", through=answering
)
def lse_in_base_2_on_extend_rows(_p: Problem, batch: Batch, answer: Output) -> Output:
    """The lse of rows of several tokens is a base-2 logarithm; that of decode rows is in nats."""
    answer.lse[of_rows(batch, batch.query_lens > 1)] /= np.float32(np.log(2))
    return answer


@kernel_fault(FaultClass.LSE, "S-7", cites="TensorRT-LLM#19112", through=scoring)
def lse_maximum_is_not_scaled(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """The lse contains the maximum of the scores without the softmax scale."""
    out, lse, scores, values = attend_one(problem, query, keys, rounding)
    highest: Array = (query @ keys.T).max(axis=1)  # [H]
    return out, lse + (1 - problem.softmax_scale) * highest, scores, values


@kernel_fault(FaultClass.LSE, "S-7", cites="vllm#49294", through=scoring)
def lse_is_the_maximum(
    problem: Problem, query: Array, keys: Array, rounding: Rounding
) -> QueryAnswer:
    """The lse is the highest score, without the logarithm of the sum."""
    out, _, scores, values = attend_one(problem, query, keys, rounding)
    highest: Array = (query @ keys.T).max(axis=1)  # [H]
    return out, problem.softmax_scale * highest, scores, values


@kernel_fault(FaultClass.RANGE, "S-5", "S-6", "S-7", cites="flashinfer#4401 flashinfer#4267")
def scores_below_a_sentinel_are_masked(oracle: Oracle) -> Oracle:
    """Queries with an lse below -5e4 are treated as masked."""
    return answering(oracle, lambda _p, _b, answer: masked_below_a_sentinel(answer))


@kernel_fault(FaultClass.PRECISION, "S-7", cites="vllm@TRITON_MLA")
def lse_in_bfloat16(oracle: Oracle) -> Oracle:
    """The lse is rounded to bfloat16."""
    return answering(
        oracle,
        lambda _p, _b, a: Output(a.out, widen(round_to(a.lse, "bfloat16")).astype(np.float32)),
    )


@kernel_fault(FaultClass.PRECISION, "S-7", cites="FastDeploy#5541")
def lse_in_float16(oracle: Oracle) -> Oracle:
    """The lse is rounded to float16."""
    return answering(
        oracle,
        lambda _p, _b, a: Output(a.out, widen(round_to(a.lse, "float16")).astype(np.float32)),
    )


@kernel_fault(FaultClass.PRECISION, *SCORED, cites="sglang@decode_attention", through=with_batch)
def queries_in_fp8(_: Problem, batch: Batch) -> Batch:
    """Queries are rounded to e4m3 before attention."""
    q_nope, q_pe = (decode(encode(x)) for x in (batch.q_nope, batch.q_pe))
    return replace(batch, q_nope=q_nope, q_pe=q_pe)


@kernel_fault(FaultClass.LAYOUT, "S-7", "S-6", cites="vllm@FLASH_ATTN_MLA vllm@FLASHMLA")
def lse_is_heads_by_tokens(oracle: Oracle) -> Oracle:
    """The lse is stored as [H, T] and read as [T, H]."""
    return answering(oracle, lambda _p, _b, a: Output(a.out, a.lse.T.reshape(a.lse.shape)))


@kernel_fault(FaultClass.LAYOUT, "S-5", "S-6", cites="vllm@FLASHMLA flashinfer#2856")
def out_is_heads_by_tokens(oracle: Oracle) -> Oracle:
    """The output is stored as [H, T, R] and read as [T, H, R]."""
    return answering(
        oracle, lambda _p, _b, a: Output(a.out.transpose(1, 0, 2).reshape(a.out.shape), a.lse)
    )


@kernel_fault(FaultClass.LAYOUT, *SCORED, cites="vllm#47779 aiconfigurator#1258", through=answering)
def heads_past_the_64th_are_not_served(_p: Problem, _b: Batch, answer: Output) -> Output:
    """Heads after the first 64 get an output of 0."""
    answer.out[:, 64:] = 0
    return answer
