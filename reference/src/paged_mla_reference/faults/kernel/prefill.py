"""Faults of prefill, attention over keys and values of every head, and of its merge (S-21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.chunked import ContextChunk, of_keys
from paged_mla_reference.rules.paging import keys_of_tokens, query_spans
from paged_mla_reference.rules.prefill import key_spans
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Output, Problem

SEEN = ("S-5", "S-6", "S-7", "S-9", "S-21")  # rules that detect wrong keys
TILE = 64
LONG_TILE = 176


def _asked(oracle: Oracle, change: Callable[[PrefillBatch], PrefillBatch]) -> Oracle:
    """Return an oracle whose prefill uses a changed batch."""
    return replace(oracle, prefill=lambda problem, batch: oracle.prefill(problem, change(batch)))


def _answered(oracle: Oracle, change: Callable[[PrefillBatch, Output], Output]) -> Oracle:
    """Return an oracle with a changed output of prefill; the change may write its arrays."""

    def prefill(problem: Problem, batch: PrefillBatch) -> Output:
        return change(batch, oracle.prefill(problem, batch))

    return replace(oracle, prefill=prefill)


@kernel_fault(FaultClass.CAUSAL, "S-4", *SEEN, cites="hyprstream#1521 TinyLLM#18", through=_asked)
def prefill_mask_is_top_left(batch: PrefillBatch) -> PrefillBatch:
    """Query i of a causal prefill sees only keys 0 to i of its row, as if without a context."""
    if not batch.causal:
        return batch
    keys, queries = batch.seq_lens.astype(np.int64), batch.query_lens
    return of_keys(batch, ContextChunk(np.zeros_like(keys), np.minimum(keys, queries)))


@kernel_fault(FaultClass.CAUSAL, "S-4", *SEEN)
def prefill_is_always_causal(oracle: Oracle) -> Oracle:
    """A context chunk, which is not causal, gets a causal mask."""
    return _asked(oracle, lambda batch: replace(batch, causal=True))


@kernel_fault(FaultClass.CAUSAL, "S-4", *SEEN)
def prefill_is_never_causal(oracle: Oracle) -> Oracle:
    """The step's own keys get no causal mask."""
    return _asked(oracle, lambda batch: replace(batch, causal=False))


@kernel_fault(FaultClass.LSE, "S-7", "S-21", cites="vllm#52796", through=_answered)
def prefill_lse_is_in_base_2(_: PrefillBatch, answer: Output) -> Output:
    """The lse of a prefill is a base-2 logarithm."""
    return Output(answer.out, answer.lse / np.float32(np.log(2)))


@kernel_fault(
    FaultClass.LSE,
    "S-7",
    "S-21",
    cites="sglang#40903 sglang#35045 flashinfer#4547",
    through=_answered,
)
def chunk_partials_in_two_bases(batch: PrefillBatch, answer: Output) -> Output:
    """The lse of a context chunk is in base 2, and that of the step's own keys is in nats."""
    base = np.float32(1 if batch.causal else np.log(2))
    return Output(answer.out, answer.lse / base)


@kernel_fault(FaultClass.SCALE, "S-5", "S-7", "S-21", akin="ollama#13893")
def scale_is_of_the_part_without_position(oracle: Oracle) -> Oracle:
    """The softmax scale is that of N dimensions, although queries and keys have N + P."""

    def prefill(problem: Problem, batch: PrefillBatch) -> Output:
        nope = problem.dims.qk_nope_head_dim
        scale = problem.softmax_scale * (batch.query_width / nope) ** 0.5
        return oracle.prefill(replace(problem, softmax_scale=scale), batch)

    return replace(oracle, prefill=prefill)


@kernel_fault(FaultClass.STRIDE, *SEEN)
def shared_rope_keys_are_strided_by_heads(oracle: Oracle) -> Oracle:
    """The rotated key of a token, shared by all heads, is read as if every head had its own."""

    def prefill(problem: Problem, batch: PrefillBatch) -> Output:
        heads, tokens = problem.dims.num_heads, np.arange(len(batch.k_pe))
        answer = oracle.prefill(problem, batch)
        for head in range(heads):
            read = (tokens * heads + head) % len(tokens)
            wrong = oracle.prefill(problem, replace(batch, k_pe=batch.k_pe[read]))
            answer.out[:, head], answer.lse[:, head] = wrong.out[:, head], wrong.lse[:, head]
        return answer

    return replace(oracle, prefill=prefill)


@kernel_fault(FaultClass.POSITION, *SEEN)
def rope_keys_are_of_the_token_before(oracle: Oracle) -> Oracle:
    """Each token's key is combined with the rotated key of the token before it."""
    return _asked(oracle, lambda batch: replace(batch, k_pe=np.roll(batch.k_pe, 1, axis=0)))


@kernel_fault(FaultClass.STRIDE, *SEEN, through=_asked)
def halves_of_a_projection_are_taken_for_whole(batch: PrefillBatch) -> PrefillBatch:
    """Values stored next to their keys are read as if they were contiguous."""
    alone = np.empty(batch.v.shape, batch.v.dtype).strides
    return replace(batch, v=np.lib.stride_tricks.as_strided(batch.v, strides=alone))


@kernel_fault(FaultClass.STRIDE, *SEEN, through=_asked)
def prefill_queries_of_one_head_are_dense(batch: PrefillBatch) -> PrefillBatch:
    """With one head, the strides of q_nope are ignored, as if it were contiguous."""
    if batch.q_nope.shape[1] != 1:
        return batch
    alone = np.empty(batch.q_nope.shape, batch.q_nope.dtype).strides
    q_nope = np.lib.stride_tricks.as_strided(batch.q_nope, strides=alone)
    return replace(batch, q_nope=q_nope)


@kernel_fault(FaultClass.STRIDE, "S-5", "S-21", through=_answered)
def values_are_no_wider_than_keys(batch: PrefillBatch, answer: Output) -> Output:
    """Output columns after the first N, the width of keys without position, are not written."""
    answer.out[:, :, batch.k_nope.shape[2] :] = 0
    return answer


@kernel_fault(FaultClass.TRUNCATED, "S-4", *SEEN, akin="vllm-ascend#14464", through=_asked)
def prefill_keys_past_1024_are_dropped(batch: PrefillBatch) -> PrefillBatch:
    """A prefill reads only the first 1024 keys of a row."""
    keys = batch.seq_lens.astype(np.int64)
    return of_keys(batch, ContextChunk(np.zeros_like(keys), np.minimum(keys, 1024)))


@kernel_fault(FaultClass.LENGTH, "S-4", *SEEN, through=_asked)
def prefill_loses_full_tiles_of_176(batch: PrefillBatch) -> PrefillBatch:
    """Rows whose length is a multiple of 176 lose their last 176 keys."""
    keys = batch.seq_lens.astype(np.int64)
    full = (keys > 0) & (keys % LONG_TILE == 0)
    return of_keys(batch, ContextChunk(np.zeros_like(keys), keys - LONG_TILE * full))


@kernel_fault(FaultClass.TRUNCATED, *SEEN, akin="flashinfer#3125", through=_answered)
def prefill_queries_past_300_are_not_answered(batch: PrefillBatch, answer: Output) -> Output:
    """A prefill computes only the first 300 queries of a row."""
    for span in query_spans(batch):
        late = slice(min(span.start + 300, span.stop), span.stop)
        answer.out[late], answer.lse[late] = 0, -np.inf
    return answer


@kernel_fault(FaultClass.TRUNCATED, "S-4", *SEEN, cites="FastDeploy#7727", through=_asked)
def key_lengths_are_query_lengths(batch: PrefillBatch) -> PrefillBatch:
    """The prefix sums of queries are also used for keys, so that rows lose keys."""
    last = min(int(batch.cu_seqlens_q[-1]), len(batch.k_pe))
    return replace(batch, cu_seqlens_k=np.minimum(batch.cu_seqlens_q, last))


@kernel_fault(FaultClass.LENGTH, "S-4", *SEEN, through=_asked)
def whole_rows_end_with_their_tile(batch: PrefillBatch) -> PrefillBatch:
    """Without a causal mask, a row also sees keys after its end, up to a multiple of 64."""
    if batch.causal:
        return batch
    lens = batch.seq_lens.astype(np.int64)
    most = len(batch.k_pe) - batch.cu_seqlens_k[:-1].astype(np.int64)
    return of_keys(batch, ContextChunk(np.zeros_like(lens), _whole_tiles(lens, most)))


@kernel_fault(FaultClass.LEAK, "S-9", akin="vllm#43961", through=_answered)
def keys_past_the_row_weigh_zero(batch: PrefillBatch, answer: Output) -> Output:
    """Values after a row's end, up to a multiple of 64, are multiplied by 0: their NaN stays."""
    for queries, keys in zip(query_spans(batch), key_spans(batch), strict=True):
        count = np.array(keys.stop - keys.start)
        stop = keys.start + int(_whole_tiles(count, np.array(len(batch.v) - keys.start)))
        answer.out[queries] += 0 * batch.v[keys.stop : stop].sum(axis=0)
    return answer


def _whole_tiles(lens: NDArray[np.int64], most: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return lengths rounded up to multiples of 64, but at most `most`."""
    return np.minimum(-(-lens // TILE) * TILE, most)


@kernel_fault(FaultClass.EMPTY, "S-6", "S-9", cites="mlxcel#679", through=_answered)
def queries_without_a_key_are_nan(_: PrefillBatch, answer: Output) -> Output:
    """The output of a query without visible keys is NaN."""
    answer.out[np.isneginf(answer.lse)] = np.nan
    return answer


@kernel_fault(FaultClass.EMPTY, "S-6", "S-21", akin="flashinfer#3047", through=_answered)
def rows_without_context_weigh_as_much(batch: PrefillBatch, answer: Output) -> Output:
    """The lse of a row without keys is 0, so that a merge counts it as a result."""
    live = np.arange(batch.num_tokens) < batch.cu_seqlens_q[-1]
    answer.lse[live & (keys_of_tokens(batch) == 0)] = 0
    return answer


@kernel_fault(FaultClass.MIXED, *SEEN, cites="sglang#19902", through=_answered)
def packed_prefills_are_read_as_padded(batch: PrefillBatch, answer: Output) -> Output:
    """Outputs are read as if every row had as many tokens as the longest row."""
    longest = int(batch.query_lens.max(initial=0))
    read = np.arange(batch.num_tokens)
    for row, span in enumerate(query_spans(batch)):
        read[span] += row * longest - span.start
    read = np.minimum(read, batch.num_tokens - 1)
    return Output(answer.out[read], answer.lse[read])
