"""The scheduler: it chooses the requests, tokens and blocks of each step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator

from paged_mla_reference.rules.paging import blocks_of
from paged_mla_reference.simulator.arrange import arrange
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.commit import commit
from paged_mla_reference.simulator.config import DraftKind, EngineConfig
from paged_mla_reference.simulator.coverage import Coverage, Situation
from paged_mla_reference.simulator.drafting import Drafter
from paged_mla_reference.simulator.notes import (
    note_accepted,
    note_admission,
    note_step,
    note_window,
)
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.sequence import Sequence
from paged_mla_reference.simulator.step import Kind, Row, Step
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Mask


class Engine:
    """A serving engine without a model.

    Each step first schedules the running requests, in the order of their admission. If there are
    not enough blocks, it preempts the request that was admitted last: the request loses its blocks,
    and its tokens are computed again later. Then the step admits waiting requests while there are
    enough rows, budget and blocks. A step that preempts a request admits none.

    Parameters
    ----------
    config : EngineConfig

    Attributes
    ----------
    pool : BlockPool
    coverage : Coverage
        Situations reached so far.
    running : list of Sequence
        Running requests in the order of their admission.
    waiting : deque of Sequence
    hit_tokens, prompt_tokens : int
        Tokens of all admissions: the tokens found in the cache, and all known tokens.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.coverage = Coverage()
        self.pool = BlockPool(config.num_blocks, config.span, self.coverage, config.seed)
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.hit_tokens = self.prompt_tokens = 0
        self._drafter = None
        if config.drafts is not None:
            rng = random.Random(config.seed)
            self._drafter = Drafter(config.drafts, config.span, self.pool, rng)
        self._live: set[str] = set()
        self._aborted: set[str] = set()
        self._last_bucket = 0
        self._number = 0
        self._steps = self._run()

    @property
    def busy(self) -> bool:
        """True while a request is running or waiting."""
        return bool(self.running or self.waiting)

    @property
    def live(self) -> set[str]:
        """Ids of unfinished requests."""
        return set(self._live)

    def submit(self, request: Request) -> None:
        """Add a request to the waiting requests.

        Raises
        ------
        InvalidArgument
            An unfinished request has the same id, or all blocks together cannot hold the request.
        """
        if request.id in self._live:
            raise InvalidArgument("request", f"a second {request.id}", "distinct ids")
        if len(request.tokens) > self.config.longest:
            given = f"{len(request.tokens)} tokens in {request.id}"
            raise InvalidArgument("request", given, f"at most {self.config.longest} tokens")
        self._live.add(request.id)
        self.waiting.append(Sequence(request, known=len(request.prompt)))

    def abort(self, request_id: str) -> None:
        """Remove a request before the next step; if drafts are running, after their verification.

        Ignore an unknown id, because the request may have finished before its client aborted it.
        """
        self._aborted.add(request_id)

    def step(self) -> Step:
        """Return the next step; it is an idle step if no request can run.

        The engine assumes that the step's outputs are sampled: its state is the state after the
        step.
        """
        return next(self._steps)

    def _run(self) -> Iterator[Step]:
        while True:
            self._drop_aborted()
            drafter = self._drafter
            if drafter is not None and self._only_decoding():
                if drafter.drafts.multi_step:
                    for rows in drafter.steps(self.running):
                        yield self._close(rows, Mask.CAUSAL)
                if drafter.drafts.kind is DraftKind.TREE:
                    trees = drafter.trees(self.running)
                    if trees:
                        yield self._close(trees, Mask.TREE)
                        continue
            yield self._close(self._causal_rows(), Mask.CAUSAL)

    def _only_decoding(self) -> bool:
        """Return whether all running requests decode, and no waiting request can join them."""
        if any(seq.prefilling or seq.window_due for seq in self.running):
            return False
        full = len(self.running) == self.config.max_rows
        return bool(self.running) and (full or not self.waiting)

    def _drop_aborted(self) -> None:
        if not self._aborted:
            return
        for seq in [seq for seq in self.running if seq.request.id in self._aborted]:
            self.coverage.note(Situation.ABORTED_RUNNING)
            self._retire(seq)
        for seq in [seq for seq in self.waiting if seq.request.id in self._aborted]:
            self.coverage.note(Situation.ABORTED_WAITING)
            self.waiting.remove(seq)
        self._live -= self._aborted
        self._aborted.clear()

    def _causal_rows(self) -> list[Row]:
        budget = self.config.token_budget
        rows: list[Row] = []
        waiting = len(self.waiting)
        index = 0
        while index < len(self.running):  # the loop may preempt the last running request
            row = self._next_row(self.running[index], budget)
            if row is not None:
                rows.append(row)
                budget -= row.query_len
            index += 1
        if len(self.waiting) == waiting:  # no request was preempted
            rows += self._admit(budget)
        return rows

    def _next_row(self, seq: Sequence, budget: int) -> Row | None:
        """Return the next row of a running request, or ``None`` without budget or blocks for it."""
        kind, tokens = self._wanted(seq, budget)
        if not tokens:
            return None
        if kind is Kind.VERIFY and not self._can_hold(seq, tokens):
            kind, tokens = Kind.DECODE, tokens[:1]
        while not self._can_hold(seq, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is seq:
                return None
        self.pool.grow(seq.blocks, seq.computed + len(tokens))
        return Row(seq.request, kind, seq.computed, tokens, tuple(seq.blocks))

    def _can_hold(self, seq: Sequence, tokens: tuple[int, ...]) -> bool:
        return self.pool.can_grow(seq.blocks, seq.computed + len(tokens))

    def _wanted(self, seq: Sequence, budget: int) -> tuple[Kind, tuple[int, ...]]:
        """Return the kind and the tokens of a request's next row; no token without budget."""
        known = seq.request.tokens[seq.computed : seq.known]
        if seq.prefilling:
            return Kind.PREFILL, known[: min(self.config.max_chunk, budget)]
        if seq.window_due:
            assert self._drafter is not None
            window = self._drafter.window(seq)
            return Kind.WINDOW, window if len(window) <= budget else ()
        drafter = self._drafter
        if drafter is None or drafter.drafts.kind is DraftKind.TREE or budget < 2:
            return Kind.DECODE, known[:budget]
        [chain] = drafter.branches(seq)
        return Kind.VERIFY, (known + chain)[:budget]

    def _admit(self, budget: int) -> list[Row]:
        """Admit waiting requests; each starts with the cached blocks of its prefix (S-13)."""
        rows: list[Row] = []
        span = self.config.span
        while self.waiting and budget and len(self.running) < self.config.max_rows:
            seq = self.waiting[0]
            full = range((seq.known - 1) // span)
            hit = self.pool.lookup([seq.content(block, span) for block in full])
            start = len(hit) * span
            tokens = seq.request.tokens[start : seq.known][: min(self.config.max_chunk, budget)]
            if not self.pool.can_take(hit, blocks_of(start + len(tokens), span) - len(hit)):
                break
            note_admission(self.coverage, self.pool, span, seq, hit)
            self.hit_tokens += start
            self.prompt_tokens += seq.known
            self.running.append(self.waiting.popleft())
            self.pool.share(hit)
            seq.blocks, seq.computed, seq.published = list(hit), start, len(hit)
            seq.target = seq.known
            self.pool.grow(seq.blocks, start + len(tokens))
            rows.append(Row(seq.request, Kind.PREFILL, start, tokens, tuple(seq.blocks)))
            budget -= len(tokens)
        return rows

    def _preempt(self, seq: Sequence) -> None:
        """Release a request's blocks; its tokens are computed again when it is resumed."""
        self.coverage.note(Situation.PREEMPTED)
        self._retire(seq)
        seq.blocks, seq.computed, seq.published = [], 0, 0
        seq.window_due, seq.preempted, seq.branches = False, True, []
        self.waiting.appendleft(seq)

    def _retire(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.pool.release(seq.blocks)

    def _close(self, rows: list[Row], mask: Mask) -> Step:
        """Build the step from its rows, commit its outputs, and count its situations."""
        step = arrange(self.config, self._number, rows, mask)
        self._number += 1
        note_step(self.coverage, self.config, step)
        self._note_bucket(step)
        sequences = {seq.request.id: seq for seq in self.running}
        accepted = []
        for row in step.rows:
            seq = sequences[row.request.id]
            if row.kind is Kind.WINDOW:
                note_window(self.coverage, seq, row)
            left = len(seq.request.tokens) - seq.known
            accepted.append(commit(seq, row))
            if accepted[-1] and len(accepted[-1]) == left:
                self.coverage.note(Situation.ENDS_IN_DRAFTS)
            self._settle(seq)
        note_accepted(self.coverage, step.rows, accepted)
        return step

    def _settle(self, seq: Sequence) -> None:
        """Publish full blocks of committed tokens, and retire the request if it is finished."""
        for block in range(seq.published, seq.computed // self.config.span):
            self.pool.publish(seq.blocks[block], seq.content(block, self.config.span))
            seq.published = block + 1
        if seq.finished:
            self._retire(seq)
            self._live.discard(seq.request.id)

    def _note_bucket(self, step: Step) -> None:
        bucket = step.num_rows if step.num_rows in self.config.buckets else 0
        if bucket and self._last_bucket:
            if bucket > self._last_bucket:
                self.coverage.note(Situation.BUCKET_GROWS)
            elif bucket < self._last_bucket:
                self.coverage.note(Situation.BUCKET_SHRINKS)
        self._last_bucket = bucket or self._last_bucket
