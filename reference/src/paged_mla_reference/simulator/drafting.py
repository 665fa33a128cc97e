"""The rows that compute drafts, and the rows that verify trees of drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.config import Drafts
from paged_mla_reference.simulator.sequence import Sequence as Running
from paged_mla_reference.simulator.speculation import draft_branches, tree_of
from paged_mla_reference.simulator.step import Kind, Row


@dataclass(frozen=True)
class Drafter:
    """Source of the drafts of running requests.

    Parameters
    ----------
    drafts : Drafts
    span : int
        Tokens per block.
    pool : BlockPool
    rng : random.Random
    """

    drafts: Drafts
    span: int
    pool: BlockPool
    rng: random.Random

    def branches(self, seq: Running) -> list[tuple[int, ...]]:
        """Return the drafts to verify: the drafts that ran through the cache, or new drafts."""
        made = seq.branches or draft_branches(seq.truth(self.drafts.depth), self.drafts, self.rng)
        seq.branches = []
        return made

    def trees(self, running: Sequence[Running]) -> list[Row]:
        """Return one tree row per request, or an empty list if there are too few blocks.

        Each request takes the blocks of its tree.
        """
        rows: list[Row] = []
        for seq in running:
            tokens, parents = tree_of(seq.request.tokens[seq.computed], self.branches(seq))
            if not self.pool.can_grow(seq.blocks, seq.computed + len(tokens)):
                return []
            self.pool.grow(seq.blocks, seq.computed + len(tokens))
            blocks = tuple(seq.blocks)
            rows.append(Row(seq.request, Kind.TREE, seq.computed, tokens, blocks, parents=parents))
        return rows

    def window(self, seq: Running) -> tuple[int, ...]:
        """Return the tokens to compute, followed by rejected drafts up to a fixed length (S-16)."""
        known = seq.request.tokens[seq.computed : seq.known]
        [rejected, *_] = draft_branches((), self.drafts, self.rng)
        return (known + rejected)[: self.drafts.window]

    def steps(self, running: Sequence[Running]) -> Iterator[list[Row]]:
        """Yield the rows of each step that runs new branches through the cache (S-15).

        A step has one token of each branch.

        Branches share the full blocks of their request. Each branch continues in its own blocks.
        Its first step writes the tokens of the request's last, partial block to them again, so no
        copy is needed. If there are too few blocks, no branch runs.
        """
        lanes: list[tuple[Running, tuple[int, ...], list[int]]] = []
        for seq in running:
            own = blocks_of(seq.computed % self.span + 1 + self.drafts.depth, self.span)
            for branch in self.branches(seq):
                if not self.pool.can_take((), own):
                    self._drop(lanes)
                    return
                seq.branches.append(branch)
                lanes.append((seq, branch, self.pool.take(own)))
        for step in range(self.drafts.depth):
            yield [self._draft_row(seq, branch, own, step) for seq, branch, own in lanes]
        for _, _, blocks in lanes:
            self.pool.release(blocks)

    def _draft_row(self, seq: Running, branch: tuple[int, ...], own: list[int], step: int) -> Row:
        """Return the row of one branch; in step 0, it begins with the tokens of a partial block."""
        shared = seq.computed // self.span
        blocks = (*seq.blocks[:shared], *own)
        if step > 0:
            context = branch[:step]
            return Row(seq.request, Kind.DRAFT, seq.known, branch[step : step + 1], blocks, context)
        start = shared * self.span
        tokens = seq.request.tokens[start : seq.known] + branch[:1]
        return Row(seq.request, Kind.DRAFT, start, tokens, blocks)

    def _drop(self, lanes: list[tuple[Running, tuple[int, ...], list[int]]]) -> None:
        for seq, _, blocks in lanes:
            seq.branches = []
            self.pool.release(blocks)
