"""Faults of visible keys: wrong lengths, wrong causal masks, and rows of the wrong kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import (
    answering,
    context_of,
    of_rows,
    only_before,
    seeing,
    with_batch,
    with_columns,
    with_problem,
)
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import query_spans
from paged_mla_shared.problem import Batch, Mask, Output, Problem

Seen = NDArray[np.bool_]
READ = ("S-4", "S-5", "S-7")  # rules that detect wrong keys
READ_EMPTY = (*READ, "S-6")  # also rows without any keys left


@kernel_fault(FaultClass.LENGTH, "S-2", *READ_EMPTY, akin="lucebox#555", through=seeing)
def newest_key_is_not_counted(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Lengths do not count the last token of the step."""
    return only_before(seen, int(batch.seq_lens[row]) - 1)


@kernel_fault(FaultClass.LENGTH, "S-9", *READ, cites="flashinfer#5075", through=seeing)
def one_key_too_many(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Every row reads one key after its end."""
    return with_columns(seen, seen.shape[1] + 1) if seen.shape[1] else seen


@kernel_fault(FaultClass.LENGTH, *READ_EMPTY, akin="sglang#32087 tokenspeed#578", through=seeing)
def first_key_is_skipped(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Key 0 of each row is not read."""
    return seen & (np.arange(seen.shape[1]) > 0)


@kernel_fault(FaultClass.LENGTH, "S-2", *READ_EMPTY, cites="sglang@KNOWN_FAILURES", through=seeing)
def lengths_exclude_the_drafts(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Rows of several tokens with a context see only the context."""
    context = context_of(batch, row)
    if len(seen) < 2 or not context:
        return seen
    return only_before(seen, context)


@kernel_fault(FaultClass.LENGTH, "S-2", "S-9", *READ, cites="FastDeploy#7727", through=seeing)
def lengths_count_the_drafts_twice(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Rows of several tokens count these tokens twice and read past their end."""
    extra = len(seen) if len(seen) > 1 and seen.shape[1] else 0
    return with_columns(seen, seen.shape[1] + extra)


@kernel_fault(FaultClass.LENGTH, *READ_EMPTY, cites="sglang#28250", through=seeing)
def only_full_blocks_are_read(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """A last block that is not full is not read."""
    return only_before(seen, seen.shape[1] // problem.block_size * problem.block_size)


@kernel_fault(FaultClass.LENGTH, *READ_EMPTY, akin="Megatron-LM#3819", through=seeing)
def a_full_last_block_is_skipped(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """If a row's length is a multiple of the block size, its last block is not read."""
    keys = seen.shape[1]
    if keys % problem.block_size:
        return seen
    return only_before(seen, keys - problem.block_size)


@kernel_fault(FaultClass.LENGTH, *READ_EMPTY, cites="vllm#48045 vllm-FlashMLA#14", through=seeing)
def prompts_of_67_to_128_tokens_are_not_served(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Rows of 67 to 128 query tokens are not computed."""
    return np.zeros_like(seen) if 67 <= len(seen) <= 128 else seen


@kernel_fault(FaultClass.CAUSAL, *READ, cites="vllm#26042 hyprstream#1521", through=seeing)
def causal_mask_is_top_left(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Query i of a row sees only its keys 0 to i, as if there were no context."""
    if problem.mask is not Mask.CAUSAL:
        return seen
    return seen & (np.arange(seen.shape[1]) <= np.arange(len(seen))[:, None])


@kernel_fault(FaultClass.CAUSAL, "S-19", *READ, cites="mlxcel#998 mlxcel#667", through=with_problem)
def the_future_is_seen(problem: Problem) -> Problem:
    """The causal mask is not applied."""
    causal = problem.mask is Mask.CAUSAL
    return replace(problem, mask=Mask.NON_CAUSAL) if causal else problem


@kernel_fault(FaultClass.CAUSAL, *READ, akin="TinyLLM#18", through=seeing)
def the_next_key_is_seen(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """With a causal mask, each query also sees the key after its own key."""
    if problem.mask is not Mask.CAUSAL or not seen.size:
        return seen
    shifted: Seen = np.hstack([np.ones((len(seen), 1), bool), seen[:, :-1]])
    return seen | shifted


@kernel_fault(
    FaultClass.CAUSAL, *READ_EMPTY, akin="flashinfer#348 paddle-flash-attention#48", through=seeing
)
def a_query_does_not_see_itself(problem: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """With a causal mask, a query does not see its own key."""
    if problem.mask is not Mask.CAUSAL:
        return seen
    last = context_of(batch, row) + np.arange(len(seen))
    return seen & (np.arange(seen.shape[1]) < last[:, None])


@kernel_fault(FaultClass.CAUSAL, *READ, cites="tpu-inference#3024", through=with_problem)
def non_causal_rows_are_causal(problem: Problem) -> Problem:
    """A causal mask is applied to a non-causal step."""
    full = problem.mask is Mask.NON_CAUSAL
    return replace(problem, mask=Mask.CAUSAL) if full else problem


@kernel_fault(FaultClass.CAUSAL, "S-9", *READ, cites="flashinfer#3716", through=seeing)
def non_causal_rows_read_whole_tiles(problem: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Without a causal mask, a row reads keys after its end, up to a multiple of 64."""
    if problem.mask is not Mask.NON_CAUSAL:
        return seen
    return with_columns(seen, -(-seen.shape[1] // 64) * 64)


@kernel_fault(FaultClass.CAUSAL, *READ, cites="flashinfer#5075 flashinfer#5095", through=seeing)
def later_query_tiles_are_not_masked(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
    """Queries after the first 64 of a row see the whole row."""
    return seen | (np.arange(len(seen)) >= 64)[:, None]


@kernel_fault(FaultClass.CAUSAL, *READ, cites="qwen38-27b-rtx3090#13", through=seeing)
def eight_drafts_across_a_tile_are_cut(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Eight tokens after a context of 124 modulo 128 do not see the next tile of 128 keys."""
    context = context_of(batch, row)
    if len(seen) != 8 or context % 128 != 124:
        return seen
    return only_before(seen, context + 4)


@kernel_fault(FaultClass.TRUNCATED, *READ_EMPTY, cites="FastDeploy#7727", through=seeing)
def cached_latents_are_not_read_back(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Rows of several tokens see only these tokens, not their context."""
    if len(seen) < 2:
        return seen
    return seen & (np.arange(seen.shape[1]) >= context_of(batch, row))


@kernel_fault(
    FaultClass.TRUNCATED, *READ_EMPTY, cites="FastDeploy#7727 FastDeploy#7804", through=seeing
)
def keys_end_at_the_longest_query(_p: Problem, batch: Batch, _r: int, seen: Seen) -> Seen:
    """The largest number of query tokens in the batch limits the keys of every row."""
    longest = int(batch.query_lens.max(initial=0))
    return only_before(seen, longest) if longest > 1 else seen


@kernel_fault(FaultClass.TRUNCATED, *READ, cites="TensorRT-LLM#13677")
def keys_past_1024_are_dropped(oracle: Oracle) -> Oracle:
    """The kernel reads only the first 1024 keys of a row."""
    return seeing(oracle, lambda _p, _b, _r, seen: only_before(seen, 1024))


@kernel_fault(FaultClass.TRUNCATED, *READ_EMPTY, cites="flashinfer#3238", through=seeing)
def queries_past_the_first_rows_are_dropped(_p: Problem, batch: Batch, _r: int, seen: Seen) -> Seen:
    """In each row, only as many query tokens are computed as the first row has."""
    served = seen.copy()
    served[int(batch.query_lens[0]) :] = False
    return served


@kernel_fault(FaultClass.MIXED, "S-5", "S-7", "S-4", cites="aiter#2720", through=answering)
def odd_query_counts_answer_as_their_first(_p: Problem, batch: Batch, answer: Output) -> Output:
    """In rows of 3, 5, 6 or 7 tokens, all tokens get the output of the first token."""
    for span in query_spans(batch):
        if span.stop - span.start in {3, 5, 6, 7}:
            answer.out[span], answer.lse[span] = answer.out[span.start], answer.lse[span.start]
    return answer


@kernel_fault(FaultClass.MIXED, "S-5", "S-7", cites="flashinfer#4382", through=with_batch)
def later_rows_take_the_queries_of_the_first(_: Problem, batch: Batch) -> Batch:
    """Rows of at least 5 tokens use the queries of the first row, if that has enough."""
    spans = query_spans(batch)
    token = np.arange(batch.num_tokens)
    for span in spans:
        count = span.stop - span.start
        if 5 <= count <= spans[0].stop:
            token[span] = np.arange(count)
    return replace(batch, q_nope=batch.q_nope[token], q_pe=batch.q_pe[token])


@kernel_fault(FaultClass.MIXED, "S-2", "S-6", "S-9", *READ, cites="vllm#52500", through=with_batch)
def rows_are_uniform_when_they_divide(problem: Problem, batch: Batch) -> Batch:
    """If rows divide the tokens evenly, all rows are treated as having equally many tokens."""
    live = int(batch.cu_seqlens_q[-1])
    if problem.mask is Mask.TREE or not live or live % batch.num_rows:
        return batch
    ends = np.arange(batch.num_rows + 1) * (live // batch.num_rows)
    return replace(batch, cu_seqlens_q=ends.astype(np.int32))


@kernel_fault(FaultClass.CONTINUATION, *READ_EMPTY, cites="vllm#47239 vllm#37303", through=seeing)
def uniform_short_prompts_are_verified(_p: Problem, batch: Batch, _r: int, seen: Seen) -> Seen:
    """Prompts of equal lengths, from 2 to 8 tokens, do not see their own tokens."""
    lengths = set(batch.query_lens.tolist())
    if len(lengths) > 1 or not lengths <= set(range(2, 9)):
        return seen
    fresh = seen.shape[1] == len(seen)
    return np.zeros_like(seen) if fresh else seen


@kernel_fault(FaultClass.CONTINUATION, *READ, cites="FastDeploy@333823c", through=with_batch)
def a_chunk_of_one_token_is_decoded(_: Problem, batch: Batch) -> Batch:
    """In mixed steps, rows of one token see at most as many keys as the first such row."""
    single = np.flatnonzero((batch.query_lens == 1) & (batch.seq_lens > 0))
    if single.size < 2 or single.size == batch.num_rows:
        return batch
    lengths = batch.seq_lens.copy()
    lengths[single] = np.minimum(lengths[single], lengths[single[0]])
    return replace(batch, seq_lens=lengths)


def _is_mixed(batch: Batch) -> bool:
    """Return whether a step has rows of one token and rows of several tokens."""
    live = batch.query_lens[batch.query_lens > 0]
    return bool((live == 1).any() and (live > 1).any())


def _zeroed(oracle: Oracle, chosen: Callable[[Batch], NDArray[np.bool_]]) -> Oracle:
    """Return an oracle in which chosen rows of mixed steps get an output of 0."""

    def change(_p: Problem, batch: Batch, answer: Output) -> Output:
        if _is_mixed(batch):
            answer.out[of_rows(batch, chosen(batch))] = 0
        return answer

    return answering(oracle, change)


@kernel_fault(FaultClass.MIXED, "S-5", "S-19", cites="FastDeploy#7804")
def extend_rows_of_mixed_steps_stay_zero(oracle: Oracle) -> Oracle:
    """In steps that also have decode rows, rows of several tokens get an output of 0."""
    return _zeroed(oracle, lambda batch: batch.query_lens > 1)


@kernel_fault(FaultClass.MIXED, "S-5", "S-19", cites="FastDeploy#7804")
def decode_rows_of_mixed_steps_stay_zero(oracle: Oracle) -> Oracle:
    """In steps that also have rows of several tokens, decode rows get an output of 0."""
    return _zeroed(oracle, lambda batch: batch.query_lens == 1)


@kernel_fault(
    FaultClass.MIXED,
    "S-1",
    "S-9",
    "S-19",
    *READ_EMPTY,
    cites="unified-cache-management#882",
    through=with_batch,
)
def decode_rows_take_tables_of_extend_rows(_: Problem, batch: Batch) -> Batch:
    """In mixed steps, the i-th decode row uses row i of the whole block table."""
    if not _is_mixed(batch):
        return batch
    table = batch.block_table.copy()
    decode = np.flatnonzero(batch.query_lens == 1)
    table[decode] = batch.block_table[: len(decode)]
    return replace(batch, block_table=table)


@kernel_fault(
    FaultClass.MIXED, "S-6", "S-19", *READ, cites="sglang@KNOWN_FAILURES", through=answering
)
def answers_stay_in_decode_first_order(_p: Problem, batch: Batch, answer: Output) -> Output:
    """Rows are sorted with decode rows first, and their outputs are not restored."""
    decode = of_rows(batch, batch.query_lens == 1)
    order = np.argsort(~decode, kind="stable")
    return Output(answer.out[order], answer.lse[order])


@kernel_fault(FaultClass.MIXED, "S-1", "S-9", *READ_EMPTY, cites="vllm#51848", through=answering)
def tables_are_indexed_by_query_token(_p: Problem, batch: Batch, answer: Output) -> Output:
    """The block table is indexed by query token: tokens past the number of rows see no keys."""
    rows, live = batch.num_rows, int(batch.cu_seqlens_q[-1])
    answer.out[rows:live], answer.lse[rows:live] = 0, -np.inf
    return answer


@kernel_fault(
    FaultClass.PAD_VALUE,
    "S-2",
    "S-6",
    *READ,
    cites="sglang#35588 sglang#26244 sglang#32791",
    through=with_batch,
)
def padded_tokens_join_the_last_row(_: Problem, batch: Batch) -> Batch:
    """Padded tokens are counted as query tokens of the last row."""
    padding = batch.num_tokens - int(batch.cu_seqlens_q[-1])
    room = batch.num_rows and batch.seq_lens[-1] - batch.query_lens[-1] >= padding
    if not padding or not room:
        return batch
    ends = batch.cu_seqlens_q.copy()
    ends[-1] = batch.num_tokens
    return replace(batch, cu_seqlens_q=ends)


@kernel_fault(FaultClass.PAD_VALUE, "S-6", "S-9", *READ, cites="sglang#7233", through=seeing)
def padded_rows_count_one_key(_p: Problem, batch: Batch, row: int, seen: Seen) -> Seen:
    """Padded rows have a length of 1 and read one key."""
    return seen if batch.seq_lens[row] else with_columns(seen, 1)


@kernel_fault(
    FaultClass.BATCH_MATE, "S-9", "S-19", *READ, akin="sglang@trtllm_mla_backend", through=seeing
)
def rows_are_as_long_as_the_longest(_p: Problem, batch: Batch, _r: int, seen: Seen) -> Seen:
    """Every row reads as many keys as the longest row."""
    return with_columns(seen, int(batch.seq_lens.max())) if seen.shape[1] else seen


@kernel_fault(
    FaultClass.BATCH_MATE,
    "S-19",
    "S-20",
    *READ,
    cites="aiter#4364 tokenspeed#904 FlashMLA#212",
    through=seeing,
)
def many_rows_leave_one_split_each(_p: Problem, batch: Batch, _r: int, seen: Seen) -> Seen:
    """In batches of more than 32 rows, each row reads only its first 128 keys."""
    return seen if batch.num_rows <= 32 else only_before(seen, 128)


@kernel_fault(
    FaultClass.BATCH_MATE,
    "S-19",
    "S-20",
    "S-5",
    "S-6",
    akin="flash-attention#2082",
    through=answering,
)
def the_batch_shares_one_maximum(_p: Problem, _b: Batch, answer: Output) -> Output:
    """Outputs with an lse more than 80 below the batch's largest lse are 0."""
    answer.out[answer.lse < answer.lse.max(initial=-np.inf) - 80] = 0
    return answer
