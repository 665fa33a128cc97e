"""Faults of scheduling, block hashes, drafts and context parallelism around a right backend.

The change of an engine fault is a context manager. While it is open, the simulator is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import takewhile
from typing import Any

import numpy as np

from paged_mla_reference.faults.fault import FaultClass, engine_fault
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.rules import prefix
from paged_mla_reference.rules.paging import query_spans
from paged_mla_reference.rules.parallel import ContextParallel, rank_batch
from paged_mla_reference.rules.prefix import ROOT_KEY, BlockContent, PrefixIndex
from paged_mla_reference.simulator import batches, trace
from paged_mla_reference.simulator import engine as scheduler
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.commit import commit
from paged_mla_reference.simulator.drafting import Drafter
from paged_mla_reference.simulator.model import Histories, ModelStandIn
from paged_mla_reference.simulator.sequence import Sequence as Running
from paged_mla_reference.simulator.step import Kind, Row, Step
from paged_mla_shared.problem import Batch, Problem

READ = ("S-5", "S-7", "S-9")  # rules by which a wrong schedule is detected

Patch = AbstractContextManager[None]


def _find(index: PrefixIndex, content: BlockContent) -> int | None:
    """Find a block by its key alone, as engines do, so that a wrong key causes a hit."""
    entry = index._entries.get(content.key)
    return None if entry is None else entry[1]


def trusting() -> tuple[object, str, Any]:
    """Return the patch after which the prefix index does not compare the contents of blocks."""
    return PrefixIndex, "find", _find


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="imp#1301 imp#1050")
def hash_ignores_the_last_token() -> Patch:
    """The hash key of a block omits its last token."""
    right = prefix.block_key

    def block_key(parent: bytes, tokens: Sequence[int], extra: Sequence[str] = ()) -> bytes:
        return right(parent, tokens[:-1], extra)

    return patched(trusting(), (prefix, "block_key", block_key))


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="imp#1301")
def hash_ignores_the_parent() -> Patch:
    """The hash key of a block omits the key of the block before it."""
    right = prefix.block_key

    def block_key(_: bytes, tokens: Sequence[int], extra: Sequence[str] = ()) -> bytes:
        return right(ROOT_KEY, tokens, extra)

    return patched(trusting(), (prefix, "block_key", block_key))


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="imp#1301 lmdeploy#4917")
def hash_ignores_the_extra_keys() -> Patch:
    """The hash key of a block omits adapters and salts."""
    right = prefix.block_key

    def block_key(parent: bytes, tokens: Sequence[int], _: Sequence[str] = ()) -> bytes:
        return right(parent, tokens)

    return patched(trusting(), (prefix, "block_key", block_key))


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="atlas#373 imp#1050")
def a_live_block_is_evicted() -> Patch:
    """Eviction takes a block without checking whether it is in use."""

    def evict(pool: BlockPool) -> int:
        block_id = next(iter(pool._contents))
        pool._cached.pop(block_id, None)
        pool._index.evict(pool._contents.pop(block_id))
        return block_id

    return patched((BlockPool, "_evict", evict))


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="imp#1050 TensorRT-LLM#12673")
def partial_blocks_are_published() -> Patch:
    """If only one token needs a new block, the row's last block is used again, even if cached."""
    right = BlockPool.grow

    def grow(pool: BlockPool, block_ids: list[int], tokens: int) -> None:
        right(pool, block_ids, max(tokens - 1, 1))
        while len(block_ids) * pool._span < tokens:
            block_ids.append(block_ids[-1])

    return patched((BlockPool, "grow", grow))


@engine_fault(FaultClass.MIXED, "S-19", "S-1", "S-6", *READ, cites="unified-cache-management#882")
def tables_of_rows_are_reversed() -> Patch:
    """The rows of the block table are in the reverse order of the rows of the step."""
    right = batches.lay_out

    def lay_out(rows: tuple[Row, ...]) -> batches.Layout:
        layout = right(rows)
        return replace(layout, block_table=layout.block_table[::-1])

    return patched((batches, "lay_out", lay_out))


@engine_fault(FaultClass.HASH, "S-13", "S-19", *READ, cites="local-inference-lab/vllm#480")
def hits_outlive_eviction() -> Patch:
    """A lookup of an evicted block still returns it, although it can hold other tokens."""
    lookup = BlockPool.lookup

    def evict(pool: BlockPool) -> int:
        block_id = pool._oldest()
        del pool._cached[block_id]
        del pool._contents[block_id]
        return block_id

    def known(pool: BlockPool, contents: Sequence[BlockContent]) -> list[int]:
        found = lookup(pool, contents)
        return list(takewhile(lambda block_id: block_id not in pool._free, found))

    return patched(trusting(), (BlockPool, "_evict", evict), (BlockPool, "lookup", known))


@engine_fault(FaultClass.STALE, "S-19", *READ, cites="vllm#49620", akin="vllm#41190")
def a_preempted_frame_is_applied() -> Patch:
    """After a preemption, one token more than the cache holds is counted as computed."""
    right = scheduler.Engine._admit

    def late(row: Row) -> Row:
        return replace(row, committed=row.committed + 1, tokens=row.tokens[1:])

    def admit(engine: scheduler.Engine, budget: int) -> list[Row]:
        resumed = {seq.request.id for seq in engine.waiting if seq.preempted}
        rows = right(engine, budget)
        return [late(r) if r.request.id in resumed and r.query_len > 1 else r for r in rows]

    return patched((scheduler.Engine, "_admit", admit))


@engine_fault(
    FaultClass.LENGTH, "S-2", "S-16", "S-19", *READ, cites="vllm#44697", akin="vllm#49355 EAGLE#336"
)
def rejected_drafts_count_as_computed() -> Patch:
    """The step after a verified chain counts rejected draft tokens as context."""
    right = batches.batch_of
    ends: dict[str, int] = {}

    def batch_of(problem: Problem, step: Step, model: ModelStandIn, histories: Histories) -> Batch:
        batch = right(problem, step, model, histories)
        lengths = batch.seq_lens.copy()
        for b, row in enumerate(step.rows):
            end = row.context_len + row.query_len
            rejected = max(ends.get(row.request.id, 0) - row.context_len, 0)
            most = min(len(row.blocks) * problem.block_size, problem.max_model_len)
            lengths[b] += min(rejected, max(most - end, 0))
            ends[row.request.id] = end if row.kind is Kind.VERIFY else 0
        return replace(batch, seq_lens=lengths)

    return patched((trace, "batch_of", batch_of))


def _committing(computed: Callable[[Running, list[int]], int], *, window_due: bool) -> Patch:
    """Return a patch that changes a row's progress after a tree with accepted tokens."""

    def wrong(seq: Running, row: Row) -> list[int]:
        accepted = commit(seq, row)
        if row.kind is Kind.TREE and accepted:
            seq.computed = min(computed(seq, accepted), seq.known - 1)
            seq.window_due = window_due
        return accepted

    return patched((scheduler, "commit", wrong))


@engine_fault(FaultClass.WINDOW, "S-16", "S-19", *READ, cites="sglang#15790 sglang#28028")
def accepted_tree_nodes_are_left_where_they_were() -> Patch:
    """Accepted tree tokens count as computed, and are not written again to their own slots."""
    return _committing(lambda seq, accepted: seq.computed + len(accepted), window_due=False)


@engine_fault(
    FaultClass.WINDOW, "S-16", "S-19", *READ, cites="sglang#21987 sglang#27545 tokenspeed#298"
)
def windows_start_one_token_late() -> Patch:
    """The first accepted tree token is not written again to its own slot."""
    return _committing(lambda seq, _: seq.computed + 1, window_due=True)


@engine_fault(FaultClass.WINDOW, "S-15", "S-19", *READ, cites="sglang#26972 sglang#27338")
def branches_do_not_copy_the_partial_block() -> Patch:
    """A branch's first step writes its draft token, but not the tokens before it in the block."""
    right = Drafter._draft_row

    def draft_row(
        drafter: Drafter, seq: Running, branch: tuple[int, ...], own: list[int], step: int
    ) -> Row:
        row = right(drafter, seq, branch, own, step)
        if step:
            return row
        return replace(row, committed=seq.known, tokens=branch[:1])

    return patched((Drafter, "_draft_row", draft_row))


@engine_fault(FaultClass.WINDOW, "S-15", "S-19", *READ, cites="sglang#26972 vllm#37599")
def branches_swap_their_blocks() -> Patch:
    """From its second token on, a branch uses the blocks of the next branch."""
    right = Drafter._draft_row
    lanes: dict[tuple[str, int], list[list[int]]] = {}

    def draft_row(
        drafter: Drafter, seq: Running, branch: tuple[int, ...], own: list[int], step: int
    ) -> Row:
        siblings = lanes.setdefault((seq.request.id, seq.known), [])
        if step == 0:
            siblings.append(own)
        else:
            own = siblings[(siblings.index(own) + 1) % len(siblings)]
        return right(drafter, seq, branch, own, step)

    return patched((Drafter, "_draft_row", draft_row))


def _dividing(change: Callable[[Batch, Batch, ContextParallel, int], Batch]) -> Patch:
    """Return a patch that changes the batch of a rank.

    `change` takes the right batch of the rank, the whole batch, the group and the rank.
    """

    def wrong(problem: Problem, batch: Batch, group: ContextParallel, rank: int) -> Batch:
        return change(rank_batch(problem, batch, group, rank), batch, group, rank)

    return patched((batches, "rank_batch", wrong))


def _counting(local_len: Callable[[ContextParallel, int, int], int]) -> Patch:
    """Return a patch that counts the keys of a rank by another formula.

    `local_len` takes the group, the number of visible keys, and the rank.
    """

    def change(local: Batch, batch: Batch, group: ContextParallel, rank: int) -> Batch:
        lengths = local.seq_lens.copy()
        for row, span in enumerate(query_spans(batch)):
            whole = int(batch.seq_lens[row])
            for i, token in enumerate(range(span.start, span.stop)):
                seen = whole - (span.stop - span.start) + i + 1
                lengths[token] = local_len(group, seen, rank) if whole else 0
        return replace(local, seq_lens=lengths)

    return _dividing(change)


RANK = ("S-18", "S-19", "S-6", *READ)


@engine_fault(FaultClass.RANKS, *RANK, cites="sglang#33064 sglang#33926")
def local_lengths_are_equal_shares() -> Patch:
    """A rank's length is the row's length divided by the ranks; the interleave is ignored."""
    return _counting(lambda group, seen, rank: (seen + group.world - 1 - rank) // group.world)


@engine_fault(FaultClass.RANKS, *RANK, cites="TransformerEngine#1930 flash-linear-attention#1092")
def the_remainder_is_dropped() -> Patch:
    """Tokens after the last complete round of all ranks are in no rank's length."""
    return _counting(
        lambda group, seen, _: seen // (group.world * group.interleave) * group.interleave
    )


@engine_fault(FaultClass.RANKS, "S-10", *RANK, akin="TensorRT-LLM#17795")
def token_0_has_no_owner() -> Patch:
    """No rank writes the first token of a row, because its owner is computed as negative."""

    def change(local: Batch, batch: Batch, _g: ContextParallel, _r: int) -> Batch:
        assert local.slot_mapping is not None
        slots = local.slot_mapping.copy()
        first = (batch.seq_lens > 0) & (batch.seq_lens == batch.query_lens)
        slots[batch.cu_seqlens_q[:-1][first]] = -1
        return replace(local, slot_mapping=slots)

    return _dividing(change)


@engine_fault(FaultClass.RANKS, *RANK, cites="tt-metal#35509 tt-metal#35987")
def latents_are_summed_over_ranks() -> Patch:
    """Latents, which are equal on all ranks, are summed over the ranks before they are stored."""
    return _dividing(
        lambda local, _b, group, _r: replace(local, ckv=local.ckv * np.float32(group.world))
    )


@engine_fault(FaultClass.RANKS, *RANK, cites="vllm#47779 tokenspeed#364")
def ranks_bound_chunks_by_their_whole_length() -> Patch:
    """Every query of a chunk sees all of the row's keys on a rank, including later tokens."""

    def change(local: Batch, batch: Batch, _g: ContextParallel, _r: int) -> Batch:
        lengths = local.seq_lens.copy()
        for span in query_spans(batch):
            lengths[span] = lengths[span].max(initial=0)
        return replace(local, seq_lens=lengths)

    return _dividing(change)
