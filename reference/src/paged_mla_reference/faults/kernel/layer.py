"""Faults of layers: of their rows, weights, masks and chunks of keys (S-21)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.addressing import as_dense
from paged_mla_reference.faults.kernel.change import masked_below_a_sentinel
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules import chunked
from paged_mla_reference.rules.chunked import ContextChunk, context_chunks, of_keys
from paged_mla_reference.rules.layer import Join, Parts, layer
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Mask, Output, Problem


def _with(
    oracle: Oracle, parts: Parts = chunked.parts_of, join: Join = chunked.merge_parts
) -> Oracle:
    """Return an oracle whose layers cut keys by `parts` and merge outputs by `join`."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        return layer(problem, batch, image, parts, join)

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.TRUNCATED, "S-21", through=_with)
def chunks_past_the_first_are_dropped(batch: PrefillBatch, workspace: int) -> list[PrefillBatch]:
    """If a context does not fit the workspace, all chunks after the first are dropped."""
    first, *others = chunked.parts_of(batch, workspace)
    return [first, *others[-1:]]


@kernel_fault(FaultClass.POSITION, "S-21", through=_with)
def every_chunk_begins_at_the_first_token(
    batch: PrefillBatch, workspace: int
) -> list[PrefillBatch]:
    """Every chunk of a context reads the row from its first token."""
    contexts = (batch.seq_lens - batch.query_lens).astype(np.int64)
    wrong = [
        ContextChunk(np.zeros_like(chunk.starts), chunk.lens)
        for chunk in context_chunks(contexts, workspace)
    ]
    chunks = [replace(of_keys(batch, chunk), causal=False) for chunk in wrong]
    return [*chunks, chunked.parts_of(batch, workspace)[-1]]


@kernel_fault(FaultClass.LSE, "S-21", "S-8", cites="sglang#40903")
def chunks_are_merged_in_another_base(oracle: Oracle) -> Oracle:
    """Context chunks have lse in base 2, and are merged as if it were in nats."""

    def join(answers: list[Output]) -> Output:
        *chunks, own = answers
        base = np.float32(np.log(2))
        return chunked.merge_parts([*(Output(c.out, c.lse / base) for c in chunks), own])

    return _with(oracle, join=join)  # type: ignore[arg-type]  # takes a list


@kernel_fault(FaultClass.MIXED, "S-21", cites="FastDeploy#7727")
def materialized_rows_are_answered_first(oracle: Oracle) -> Oracle:
    """The outputs of materialized rows are stored before the outputs of absorbed rows."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        right = layer(problem, batch, image)
        first = int(batch.step.cu_seqlens_q[batch.absorbed_rows])
        return Output(np.roll(right.out, -first, axis=0), np.roll(right.lse, -first, axis=0))

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.STRIDE, "S-21")
def weights_are_split_in_halves(oracle: Oracle) -> Oracle:
    """kv_b_proj is read as all heads' keys followed by all heads' values, not head by head."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        dims, weight = problem.dims, batch.kv_b_proj
        keys = dims.num_heads * dims.qk_nope_head_dim
        rank = weight.shape[1]
        halves = [half.reshape(dims.num_heads, -1, rank) for half in np.split(weight, [keys])]
        swapped = np.concatenate(halves, axis=1).reshape(weight.shape)
        return layer(problem, replace(batch, kv_b_proj=swapped), image)

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.STRIDE, "S-9", "S-21")
def weights_are_taken_for_dense(oracle: Oracle) -> Oracle:
    """The strides of kv_b_proj are ignored, as if it were contiguous."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        return layer(problem, replace(batch, kv_b_proj=as_dense(batch.kv_b_proj)), image)

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.ROPE, "S-12", "S-21")
def materialized_queries_are_not_rotated(oracle: Oracle) -> Oracle:
    """The queries of materialized rows are not rotated."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        right = layer(problem, batch, image)
        unrotated = layer(replace(problem, rope=None), batch, image)
        first = int(batch.step.cu_seqlens_q[batch.absorbed_rows])
        right.out[first:], right.lse[first:] = unrotated.out[first:], unrotated.lse[first:]
        return right

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.MASK, "S-4", "S-14", "S-21")
def layers_take_every_mask_for_causal(oracle: Oracle) -> Oracle:
    """A layer ignores the mask and uses a causal mask."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        problem = replace(problem, mask=Mask.CAUSAL, max_draft_tokens=0)
        return layer(problem, replace(batch, step=replace(batch.step, mask=None)), image)

    return replace(oracle, layer=wrong)


@kernel_fault(FaultClass.RANGE, "S-6", "S-21", akin="flashinfer#4401 flashinfer#4267")
def layer_scores_below_a_sentinel_are_masked(oracle: Oracle) -> Oracle:
    """Queries of a layer with an lse below -5e4 are treated as masked."""

    def wrong(problem: Problem, batch: LayerBatch, image: CacheImage) -> Output:
        return masked_below_a_sentinel(layer(problem, batch, image))

    return replace(oracle, layer=wrong)
