"""Counting of the situations of an admission, a step and its outputs."""

from __future__ import annotations

from collections.abc import Sequence as Many

from paged_mla_reference.rules.prefix import block_contents
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.config import EngineConfig
from paged_mla_reference.simulator.coverage import Coverage, Situation
from paged_mla_reference.simulator.sequence import Sequence
from paged_mla_reference.simulator.step import Kind, Row, Step


def note_admission(
    coverage: Coverage, pool: BlockPool, span: int, seq: Sequence, hit: Many[int]
) -> None:
    """Count the situations of the admission of `seq`, before the blocks of its hit are shared."""
    if seq.preempted:
        coverage.note(Situation.RESUMED)
    if not hit:
        if seq.request.extra_keys:
            plain = block_contents(seq.request.tokens[: seq.known - 1], span)
            if pool.lookup(plain):
                coverage.note(Situation.OTHER_KEYS)
        return
    if seq.preempted:
        coverage.note(Situation.RESUMED_WITH_HIT)
    if any(pool.references(block_id) for block_id in hit):
        coverage.note(Situation.HIT_ON_LIVE)
    _note_edge(coverage, pool, span, seq)


def _note_edge(coverage: Coverage, pool: BlockPool, span: int, seq: Sequence) -> None:
    blocks, past_edge = divmod(seq.known, span)
    if past_edge == span - 1 and span > 2:
        coverage.note(Situation.HIT_BEFORE_EDGE)
    if past_edge == 1 and span > 2:
        coverage.note(Situation.HIT_AFTER_EDGE)
    if past_edge == 0:
        coverage.note(Situation.HIT_AT_EDGE)
        if len(pool.lookup([seq.content(block, span) for block in range(blocks)])) == blocks:
            coverage.note(Situation.FULL_PROMPT_HIT)


def note_step(coverage: Coverage, config: EngineConfig, step: Step) -> None:
    """Count the situations of the rows of a step and of its padding."""
    if not step.rows:
        coverage.note(Situation.IDLE)
    if step.num_rows > len(step.rows):
        coverage.note(Situation.PADDED_ROWS)
    padded_rows = step.num_rows - len(step.rows)
    if step.num_tokens > step.query_tokens + step.padded_query_len * padded_rows:
        coverage.note(Situation.PADDED_TOKENS)
    for row in step.rows:
        if row.kind is Kind.PREFILL:
            _note_chunk(coverage, row)
        elif row.kind is Kind.DRAFT and not row.branch:
            shared = row.committed > 0
            coverage.note(Situation.DRAFT_SHARED_BLOCK if shared else Situation.DRAFT_NO_FULL_BLOCK)
            if row.query_len > 2:
                coverage.note(Situation.DRAFT_PARTIAL_BLOCK)
    _note_mixture(coverage, step)
    world, interleave = config.group.world, config.group.interleave
    if any(row.context_len < (world - 1) * interleave for row in step.rows):
        coverage.note(Situation.RANK_WITHOUT_KEYS)


def _note_chunk(coverage: Coverage, row: Row) -> None:
    if row.committed == 0:
        coverage.note(Situation.FRESH_CHUNK)
        return
    coverage.note(Situation.CONTINUATION)
    if row.query_len == 1:
        coverage.note(Situation.CONTINUATION_OF_ONE)


def _note_mixture(coverage: Coverage, step: Step) -> None:
    prefill = [row.kind is Kind.PREFILL for row in step.rows]
    if all(prefill) or not any(prefill):
        return
    first = prefill.index(True)
    ordered = not all(prefill[first:])
    coverage.note(Situation.PREFILL_FIRST if ordered else Situation.DECODE_FIRST)
    if any(row.kind is Kind.PREFILL and row.committed for row in step.rows):
        coverage.note(Situation.CONTINUATION_BESIDE_DECODE)
    if any(row.kind is Kind.VERIFY for row in step.rows):
        coverage.note(Situation.CHAIN_BESIDE_PREFILL)


def note_accepted(coverage: Coverage, rows: Many[Row], accepted: Many[list[int]]) -> None:
    """Count the situations of the accepted and rejected drafts of a step."""
    for row, path in zip(rows, accepted, strict=True):
        if row.kind is Kind.VERIFY:
            right = {0: Situation.CHAIN_NONE, row.query_len - 1: Situation.CHAIN_ALL}
            coverage.note(right.get(len(path), Situation.CHAIN_SOME))
        elif row.kind is Kind.TREE and not path:
            coverage.note(Situation.TREE_NONE)
        elif row.kind is Kind.TREE and path[-1] > len(path):
            coverage.note(Situation.TREE_NOT_CONTIGUOUS)
    trees = (path for row, path in zip(rows, accepted, strict=True) if row.kind is Kind.TREE)
    lengths = {len(path) for path in trees if path}
    if len(lengths) > 1:
        coverage.note(Situation.TREE_LENGTHS)


def note_window(coverage: Coverage, seq: Sequence, row: Row) -> None:
    """Count whether a window reaches past the accepted tokens; call it before ``commit``."""
    past = row.query_len > seq.known - row.committed
    coverage.note(Situation.WINDOW_PAST_ACCEPTED if past else Situation.WINDOW_ALL_ACCEPTED)
