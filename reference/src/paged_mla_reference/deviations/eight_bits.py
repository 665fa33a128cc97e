"""Kernels of their own for caches of 8 bits, which lack what the others have."""

from __future__ import annotations

from dataclasses import replace

from paged_mla_reference.deviations.change import Matrices, Seen, masked, posed, seeing
from paged_mla_reference.deviations.deviation import Fault, breaks
from paged_mla_reference.oracle import Oracle
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Batch, Problem

_NODES = 32
_QUERIES = 64
_TOKENS = 64


def _is_of_8_bits(problem: Problem) -> bool:
    return not FORMATS[problem.cache_format].is_plain


@breaks(Fault.SCALE, "S-5", "S-7", "S-11")
def scales_of_scores_are_derived_over_8_bits(oracle: Oracle) -> Oracle:
    """Over FP8 caches the scale of scores follows from the widths, without that of a long rope."""

    def derived(problem: Problem) -> Problem:
        dims = problem.dims
        scale = (dims.qk_nope_head_dim + dims.qk_rope_head_dim) ** -0.5
        return replace(problem, softmax_scale=scale) if _is_of_8_bits(problem) else problem

    return posed(oracle, derived)


@breaks(Fault.ROPE, "S-11", "S-10", "S-12", "S-5", "S-7")
def theta_is_10000_over_8_bits(oracle: Oracle) -> Oracle:
    """What rotates and quantises does not ask for the base of the rotation."""

    def usual(problem: Problem) -> Problem:
        if problem.rope is None or not _is_of_8_bits(problem):
            return problem
        return replace(problem, rope=replace(problem.rope, theta=1e4))

    both = posed(oracle, usual)
    return replace(both, append=lambda p, b, image: oracle.append(usual(p), b, image))


@breaks(Fault.MASK, "S-11", "S-4", "S-5", "S-7", "S-14")
def trees_have_32_nodes_over_8_bits(oracle: Oracle) -> Oracle:
    """Over FP8 caches a mask has one word: drafts see no other past the 32nd."""

    def cut(problem: Problem, _batch: Batch, matrices: Matrices) -> Matrices:
        if not _is_of_8_bits(problem):
            return matrices
        shortened = [matrix.copy() for matrix in matrices]
        for matrix in shortened:
            diagonal = matrix.diagonal().copy()
            matrix[:, _NODES:] = False
            matrix[range(len(matrix)), range(len(matrix))] = diagonal
        return shortened

    return masked(oracle, cut)


@breaks(Fault.CAUSAL, "S-11", "S-4", "S-5", "S-7")
def tiles_of_queries_are_not_masked_over_8_bits(oracle: Oracle) -> Oracle:
    """Over FP8 caches queries past the first 64 of a row see all of it."""

    def see(problem: Problem, _batch: Batch, _row: int, seen: Seen) -> Seen:
        if not _is_of_8_bits(problem) or len(seen) <= _QUERIES:
            return seen
        more = seen.copy()
        more[_QUERIES:] = True
        return more

    return seeing(oracle, see)


@breaks(Fault.PAGE, "S-1", "S-5", "S-7", "S-11")
def blocks_have_64_tokens_over_8_bits(oracle: Oracle) -> Oracle:
    """Over FP8 caches what a block has past its 64th token is not read."""

    def see(problem: Problem, _batch: Batch, _row: int, seen: Seen) -> Seen:
        if not _is_of_8_bits(problem) or problem.block_size <= _TOKENS:
            return seen
        fewer = seen.copy()
        for first in range(_TOKENS, seen.shape[1], problem.block_size):
            fewer[:, first : first + problem.block_size - _TOKENS] = False
        return fewer

    return seeing(oracle, see)
