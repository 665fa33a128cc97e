"""A check of a schedule without attention: every slot that a step reads must hold the right token.

A shadow cache stores, for every slot, the token prefix whose latent was written to it. The lengths
and block tables of a step must give each of its query tokens exactly its own prefix. For every
finished request, each output token must have been computed.
"""

from __future__ import annotations

from collections.abc import Container

from paged_mla_reference.simulator.batches import Layout
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.model import Histories, State
from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.step import Kind, Row, Step


class Violation(AssertionError):
    """The error of a schedule that cannot give correct outputs."""


class Audit:
    """Check of the steps of one engine, from its first step on.

    Parameters
    ----------
    engine : Engine
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._span = engine.config.span
        self._histories = Histories()
        self._held: dict[int, State] = {}
        self._answered: dict[str, set[int]] = {}
        self._requests: dict[str, Request] = {}

    def check_step(self, step: Step, layout: Layout) -> None:
        """Check one step: first every write, then every read, in the order of a backend.

        Parameters
        ----------
        step : Step
        layout : Layout
            The lengths and blocks of the step's rows.

        Raises
        ------
        Violation
            A length, a token or a slot is wrong.
        """
        if len(layout.seq_lens) != len(step.rows):
            raise Violation(
                f"step {step.number}: the layout has {len(layout.seq_lens)} rows, "
                "but the step has another number of rows"
            )
        written: set[int] = set()
        for b, row in enumerate(step.rows):
            self._check_lengths(step, b, row, layout)
            self._check_tokens(step, b, row)
            for i, state in enumerate(self._histories.of_queries(row)):
                slot = self._slot(layout, b, row.context_len + i)
                if slot in written:
                    raise Violation(f"{_place(step, b, row)}: slot {slot} is written twice")
                written.add(slot)
                self._held[slot] = state
        for b, row in enumerate(step.rows):
            self._check_reads(step, b, row, layout)

    def check_end(self, aborted: Container[str] = ()) -> None:
        """Check an engine without requests: no block is in use, and every token was computed.

        Parameters
        ----------
        aborted : container of str
            Ids of requests that may be unfinished.

        Raises
        ------
        Violation
            A block is in use or lost, or a token was not computed.
        """
        pool = self._engine.pool
        used = [b for b in range(self._engine.config.num_blocks) if pool.references(b)]
        if used:
            raise Violation(f"blocks {used} are in use, but no request is left")
        if pool.available != self._engine.config.num_blocks:
            raise Violation(f"{self._engine.config.num_blocks - pool.available} blocks are lost")
        for request in self._requests.values():
            needed = set(range(len(request.prompt) - 1, len(request.tokens) - 1))
            missing = needed - self._answered[request.id]
            if missing and request.id not in aborted:
                raise Violation(f"{request.id}: tokens {sorted(missing)} were never computed")

    def _check_lengths(self, step: Step, b: int, row: Row, layout: Layout) -> None:
        query_len = int(layout.cu_seqlens_q[b + 1] - layout.cu_seqlens_q[b])
        context_len = int(layout.seq_lens[b]) - query_len
        before = row.committed + len(row.branch)
        if query_len != row.query_len or context_len != before:
            raise Violation(
                f"{_place(step, b, row)}: {query_len} tokens after {context_len}, "
                f"but the row's context has {before} tokens"
            )

    def _check_tokens(self, step: Step, b: int, row: Row) -> None:
        """Check the tokens of a row that are not drafts, and note which tokens it computes.

        The function compares the first token, or every token of a prefill, with the request. It
        does not compare rows that compute drafts.
        """
        request, answered = row.request, self._answered.setdefault(row.request.id, set())
        self._requests[request.id] = request
        certain = row.query_len if row.kind is Kind.PREFILL else 1
        if row.kind is not Kind.DRAFT:
            expected = request.tokens[row.committed : row.committed + certain]
            if row.tokens[:certain] != expected:
                raise Violation(f"{_place(step, b, row)}: the tokens are not the request's tokens")
        truth = self._histories
        for i, state in enumerate(self._histories.of_queries(row)):
            index = row.context_len + len(row.ancestors(i)) - 1
            if index < len(request.tokens) and state == truth.state(request, index + 1):
                answered.add(index)

    def _check_reads(self, step: Step, b: int, row: Row, layout: Layout) -> None:
        own = [self._histories.state(row.request, p + 1) for p in range(row.committed)]
        expected = own + self._histories.of_branch(row) + self._histories.of_queries(row)
        for index, state in enumerate(expected):
            slot = self._slot(layout, b, index)
            held = self._held.get(slot)
            if held != state:
                found = "no token" if held is None else "a token of another prefix"
                raise Violation(
                    f"{_place(step, b, row)}: index {index} is in slot {slot}, which has {found}"
                )

    def _slot(self, layout: Layout, b: int, index: int) -> int:
        block, offset = divmod(index, self._span)
        if block >= layout.block_table.shape[1]:
            raise Violation(f"row {b}: the block table has no entry for index {index}")
        return int(layout.block_table[b, block]) * self._span + offset


def _place(step: Step, b: int, row: Row) -> str:
    return f"step {step.number}, row {b} ({row.kind} of {row.request.id})"
