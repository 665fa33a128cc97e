"""Faults of kernels for 8-bit caches, which lack features of the other kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel import frequencies, scores
from paged_mla_reference.faults.kernel.change import Seen, masked, only_before, seeing
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.problem import Batch, Problem

_NODES = 32
_QUERIES = 64
_TOKENS = 64
_KEYS = 1024
_TILE = 192


def _over_8_bits(right: Oracle, wrong: Oracle) -> Oracle:
    """Return an oracle that is wrong only in appends and attention with FP8 caches."""

    def of(problem: Problem) -> Oracle:
        return right if problem.layout.format.is_plain else wrong

    return replace(
        right,
        append=lambda problem, batch, image: of(problem).append(problem, batch, image),
        attend=lambda problem, batch, image: of(problem).attend(problem, batch, image),
    )


@kernel_fault(FaultClass.SCALE, "S-5", "S-7", "S-11")
def scales_of_scores_are_derived_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, the softmax scale is always (N + P) ** -0.5."""
    return _over_8_bits(oracle, scores.scale_is_derived_from_the_dims.change(oracle))


@kernel_fault(FaultClass.ROPE, "S-11", "S-10", "S-12", "S-5", "S-7")
def theta_is_10000_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, the base of the rotation is always 10000."""
    return _over_8_bits(oracle, frequencies.theta_is_always_10000.change(oracle))


@kernel_fault(FaultClass.MASK, "S-11", "S-4", "S-5", "S-7", "S-14")
def trees_have_32_nodes_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, draft tokens do not see other draft tokens after the first 32."""

    def cut(matrix: NDArray[np.bool_]) -> NDArray[np.bool_]:
        return matrix & ((np.arange(len(matrix)) < _NODES) | np.eye(len(matrix), dtype=bool))

    return _over_8_bits(oracle, masked(oracle, lambda _p, _b, trees: [*map(cut, trees)]))


@kernel_fault(FaultClass.CAUSAL, "S-11", "S-4", "S-5", "S-7")
def tiles_of_queries_are_not_masked_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, queries after the first 64 of a row see the whole row."""

    def see(_problem: Problem, _b: Batch, _row: int, seen: Seen) -> Seen:
        return seen | (np.arange(len(seen))[:, None] >= _QUERIES)

    return _over_8_bits(oracle, seeing(oracle, see))


@kernel_fault(FaultClass.PAGE, "S-1", "S-5", "S-7", "S-11")
def blocks_have_64_tokens_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, the kernel reads only the first 64 tokens of a block."""

    def see(problem: Problem, _b: Batch, _row: int, seen: Seen) -> Seen:
        return seen & (np.arange(seen.shape[1]) % problem.block_size < _TOKENS)

    return _over_8_bits(oracle, seeing(oracle, see))


@kernel_fault(FaultClass.TRUNCATED, "S-4", "S-5", "S-7", "S-11", akin="vllm-ascend#14464")
def drafts_see_1024_keys_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, rows of several queries see only their first 1024 keys."""

    def see(_problem: Problem, _b: Batch, _row: int, seen: Seen) -> Seen:
        return only_before(seen, _KEYS) if len(seen) > 1 else seen

    return _over_8_bits(oracle, seeing(oracle, see))


@kernel_fault(FaultClass.LENGTH, "S-4", "S-5", "S-6", "S-7", "S-11")
def full_tiles_of_192_are_lost_over_8_bits(oracle: Oracle) -> Oracle:
    """With an FP8 cache, rows whose length is a multiple of 192 lose their last 192 keys."""

    def see(_problem: Problem, _b: Batch, _row: int, seen: Seen) -> Seen:
        keys = seen.shape[1]
        return seen if keys % _TILE else only_before(seen, keys - _TILE)

    return _over_8_bits(oracle, seeing(oracle, see))
