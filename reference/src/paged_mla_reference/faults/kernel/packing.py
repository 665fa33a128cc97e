"""Faults of the layout of heads and tokens in queries and outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, kernel_fault
from paged_mla_reference.faults.kernel.change import Seen, answering, seeing, with_batch
from paged_mla_reference.oracle import Oracle
from paged_mla_reference.rules.paging import query_spans
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem


@kernel_fault(
    FaultClass.LAYOUT,
    "S-5",
    "S-7",
    "S-9",
    cites="vllm#38615 vllm-ascend#9560",
    akin="aiconfigurator#1258",
    through=with_batch,
)
def query_heads_are_rounded_up_in_one_place(problem: Problem, batch: Batch) -> Batch:
    """Queries are read as if heads were padded to a power of two, although they are not."""
    heads, tokens = problem.dims.num_heads, batch.num_tokens
    at = _padded_places(tokens, heads)
    token, head = np.divmod(at % max(tokens * heads, 1), heads)
    return replace(batch, q_nope=batch.q_nope[token, head], q_pe=batch.q_pe[token, head])


def _padded_places(tokens: int, heads: int) -> NDArray[np.int64]:
    """Return the places of heads if they are padded to a power of two, int64 [T, H]."""
    return np.arange(tokens)[:, None] * _power_of_two(heads) + np.arange(heads)


def _power_of_two(heads: int) -> int:
    return 1 << (heads - 1).bit_length()


@kernel_fault(
    FaultClass.LAYOUT,
    "S-5",
    "S-6",
    "S-7",
    "S-9",
    akin="vllm#38615 vllm-ascend#9560 aiconfigurator#1258",
)
def query_heads_are_rounded_up_in_both_places(oracle: Oracle) -> Oracle:
    """Queries are read, and outputs written, as if heads were padded to a power of two.

    A pair of token and head reads the query at the padded place, and writes its output there. It
    sees the keys of its own token. Places after the end of the arrays are omitted.
    """

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        shape = batch.q_nope.shape[:2]
        at = _padded_places(*shape)
        inside = at < at.shape[0] * at.shape[1]
        taken = {}
        for name in ("q_nope", "q_pe"):
            given = getattr(batch, name)
            taken[name] = np.zeros_like(given)
            taken[name][inside] = given.reshape(-1, given.shape[-1])[at[inside]]
        answer = oracle.attend(problem, replace(batch, **taken), image)
        out = np.zeros((at.size, answer.out.shape[-1]), answer.out.dtype)
        lse = np.full(at.size, -np.inf, answer.lse.dtype)
        out[at[inside]], lse[at[inside]] = answer.out[inside], answer.lse[inside]
        return Output(out.reshape(answer.out.shape), lse.reshape(shape))

    return replace(oracle, attend=attend)


@kernel_fault(
    FaultClass.LAYOUT,
    "S-5",
    "S-7",
    akin="vllm#38615 vllm-ascend#9560 aiconfigurator#1258",
    through=with_batch,
)
def query_heads_are_padded_and_read_unpadded(problem: Problem, batch: Batch) -> Batch:
    """Queries are padded to a power of two of heads, and read as if they were not padded."""
    heads, tokens = problem.dims.num_heads, batch.num_tokens
    more = ((0, 0), (0, _power_of_two(heads) - heads), (0, 0))

    def read(given: NDArray[Any]) -> NDArray[Any]:
        pairs = np.pad(given, more).reshape(-1, given.shape[-1])
        return pairs[: tokens * heads].reshape(given.shape)

    return replace(batch, q_nope=read(batch.q_nope), q_pe=read(batch.q_pe))


@kernel_fault(
    FaultClass.LAYOUT, "S-5", akin="vllm#50578 vllm#51088 ollama#14054", through=answering
)
def heads_past_the_last_full_tile_are_not_served(
    problem: Problem, _b: Batch, answer: Output
) -> Output:
    """Heads after the last full tile of 16 heads get an output of 0."""
    heads = problem.dims.num_heads
    if heads > 16:
        answer.out[:, heads // 16 * 16 :] = 0
    return answer


@kernel_fault(FaultClass.STRIDE, "S-5", cites="aiter#3910", through=answering)
def folded_rows_are_strided_twice(_p: Problem, batch: Batch, answer: Output) -> Output:
    """If all rows have the same number of tokens, that number is applied twice to the stride."""
    counts = set(batch.query_lens.tolist())
    if len(counts) != 1 or counts <= {0, 1}:
        return answer
    [count] = counts
    out = np.zeros_like(answer.out)
    first = np.arange(batch.num_rows) * count
    first = first[first * count < len(out)]
    out[first * count] = answer.out[first]
    return Output(out, answer.lse)


@kernel_fault(FaultClass.LAYOUT, "S-5", "S-6", cites="sglang#19902", through=answering)
def packed_answers_are_read_as_padded(_p: Problem, batch: Batch, answer: Output) -> Output:
    """Outputs are read as if every row had as many tokens as the longest row."""
    width = int(batch.query_lens.max(initial=0))
    out = np.zeros_like(answer.out)
    for row, span in enumerate(query_spans(batch)):
        found = answer.out[row * width : row * width + span.stop - span.start]
        out[span.start : span.start + len(found)] = found
    return Output(out, answer.lse)


@kernel_fault(FaultClass.LAYOUT, "S-5", "S-7", through=with_batch)
def second_halves_of_32_heads_repeat_the_first(problem: Problem, batch: Batch) -> Batch:
    """With 32 heads, the second 16 heads use the queries of the first 16 heads."""
    if problem.dims.num_heads != 32:
        return batch
    heads = np.arange(32) % 16
    return replace(batch, q_nope=batch.q_nope[:, heads], q_pe=batch.q_pe[:, heads])


@kernel_fault(FaultClass.LAYOUT, "S-4", "S-5", "S-7")
def queries_of_a_folded_tile_are_counted_from_its_first(oracle: Oracle) -> Oracle:
    """In tiles of 64 pairs of query and head, masks assume that each tile begins with head 0."""

    def see_less(_p: Problem, _b: Batch, _r: int, seen: Seen) -> Seen:
        return np.vstack([seen[:1], seen[:-1]])  # the keys of the query before it

    late = seeing(oracle, see_less)

    def attend(problem: Problem, batch: Batch, image: CacheImage) -> Output:
        answer, heads = oracle.attend(problem, batch, image), problem.dims.num_heads
        if heads % 64 == 0 or 64 % heads == 0:
            return answer
        other = late.attend(problem, batch, image)
        for span in query_spans(batch):
            pair = np.arange((span.stop - span.start) * heads)
            inside = pair % 64
            is_late = (pair - inside) // heads + inside // heads < pair // heads
            lost = is_late.reshape(-1, heads)  # [q, H]
            answer.out[span][lost], answer.lse[span][lost] = (
                other.out[span][lost],
                other.lse[span][lost],
            )
        return answer

    return replace(oracle, attend=attend)


@kernel_fault(FaultClass.MIXED, "S-5", "S-6", "S-7", through=answering)
def decode_rows_are_put_back_in_another_order(_p: Problem, batch: Batch, answer: Output) -> Output:
    """More than 7 decode rows are sorted by length, and their outputs are sorted once more."""
    rows = batch.num_rows
    if rows > 7 and (batch.query_lens == 1).all():
        order = np.argsort(-batch.seq_lens, kind="stable")
        found = order[order]
        answer.out[:rows], answer.lse[:rows] = answer.out[found], answer.lse[found]
    return answer


@kernel_fault(FaultClass.LAYOUT, "S-7", "S-6", through=answering)
def lse_is_written_for_padded_heads(_p: Problem, _b: Batch, answer: Output) -> Output:
    """In steps of more than 52 tokens, lse is written with padded heads and read without."""
    tokens, heads = answer.lse.shape
    if tokens <= 52:
        return answer
    padded = np.pad(answer.lse, ((0, 0), (0, -heads % 16)), constant_values=-np.inf)
    return Output(answer.out, padded.ravel()[: answer.lse.size].reshape(answer.lse.shape))
