"""Faults of 8-bit queries."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.formats import flushed
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules import queries
from paged_mla_reference.rules.e4m3 import encode
from paged_mla_reference.rules.fp8 import quantize, scale_of
from paged_mla_shared.problem import Batch, Mask, Problem

Quantized = tuple[NDArray[np.uint8], NDArray[np.float32]]
WRITTEN = ("S-11",)


def _with(oracle: Oracle, name: str, value: Any) -> Oracle:
    """Return an oracle whose quantization of queries uses another function."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        with patched((queries, name, value)):
            return oracle.quantize_queries(problem, batch, scale)

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.SCALE, *WRITTEN, akin="maxtext#3138")
def query_scales_are_inverted(oracle: Oracle) -> Oracle:
    """The returned scales are the inverses of the right scales."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        codes, scales = oracle.quantize_queries(problem, batch, scale)
        return codes, np.float32(1) / scales

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.SCALE, *WRITTEN, akin="vllm#42956")
def query_scales_are_those_of_the_latent_part(oracle: Oracle) -> Oracle:
    """A query's scale is computed without its rotated part, which can saturate."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        def of_latents(x: NDArray[np.float32]) -> NDArray[np.float32]:
            return scale_of(x[..., : problem.dims.kv_lora_rank])

        with patched((queries, "scale_of", of_latents)):
            return oracle.quantize_queries(problem, batch, scale)

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.SCALE, *WRITTEN)
def a_given_query_scale_is_ignored(oracle: Oracle) -> Oracle:
    """A scale that the caller passes is ignored; scales are computed from the data."""
    return replace(
        oracle, quantize_queries=lambda p, batch, _: oracle.quantize_queries(p, batch, None)
    )


@kernel_fault(FaultClass.STRIDE, *WRITTEN)
def heads_of_a_query_share_a_scale(oracle: Oracle) -> Oracle:
    """All heads of a token get the largest of their scales."""

    def of_token(x: NDArray[np.float32]) -> NDArray[np.float32]:
        return np.repeat(scale_of(x).max(axis=1, keepdims=True), x.shape[1], axis=1)

    return _with(oracle, "scale_of", of_token)


@kernel_fault(FaultClass.RANGE, *WRITTEN, akin="vllm#42956")
def large_queries_become_nan(oracle: Oracle) -> Oracle:
    """Numbers of queries that are too large for e4m3 become NaN; they do not saturate."""

    def not_saturating(x: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.where(np.abs(x / scale) > 464, np.uint8(0x7F), quantize(x, scale))

    return _with(oracle, "quantize", not_saturating)


@kernel_fault(FaultClass.RANGE, *WRITTEN)
def infinite_queries_saturate(oracle: Oracle) -> Oracle:
    """Infinite numbers of queries saturate; the code is the largest number instead of NaN."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        codes, scales = oracle.quantize_queries(problem, batch, scale)
        x = np.concatenate([batch.q_nope, batch.q_pe], axis=-1)
        return np.where(np.isinf(x), encode(x), codes), scales

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.PRECISION, *WRITTEN)
def subnormal_queries_are_flushed(oracle: Oracle) -> Oracle:
    """Subnormal numbers of queries, below 2^-126, become zeros."""
    return _with(oracle, "to_float32", flushed)


@kernel_fault(FaultClass.ROPE, "S-3", "S-12", *WRITTEN)
def draft_queries_are_rotated_by_index(oracle: Oracle) -> Oracle:
    """Queries of a tree are rotated by their index in the row, not by their depth."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        chain = replace(problem, mask=Mask.CAUSAL, max_draft_tokens=0)
        return oracle.quantize_queries(chain, replace(batch, mask=None), scale)

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.TRUNCATED, *WRITTEN)
def query_lines_past_1024_are_not_quantized(oracle: Oracle) -> Oracle:
    """Only the first 1024 pairs of token and head are quantized; later codes are 0."""

    def quantize_queries(problem: Problem, batch: Batch, scale: float | None) -> Quantized:
        codes, scales = oracle.quantize_queries(problem, batch, scale)
        codes.reshape(-1, codes.shape[-1])[1024:] = 0
        return codes, scales

    return replace(oracle, quantize_queries=quantize_queries)


@kernel_fault(FaultClass.ROPE, "S-12", *WRITTEN)
def queries_are_quantized_before_they_are_rotated(oracle: Oracle) -> Oracle:
    """The codes and scales are those of the queries before their rotation."""
    return replace(
        oracle,
        quantize_queries=lambda problem, batch, scale: oracle.quantize_queries(
            replace(problem, rope=None), batch, scale
        ),
    )
