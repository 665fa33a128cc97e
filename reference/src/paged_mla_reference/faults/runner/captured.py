"""Runners that reuse sizes, lengths or tables of the first step, as captured graphs do."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import Fault, FaultClass, runner_fault
from paged_mla_reference.faults.kernel import visibility
from paged_mla_reference.faults.kernel.change import of_rows
from paged_mla_reference.faults.runner.stale import SHOWS
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.oracle import RIGHT, ReferenceRunner
from paged_mla_reference.rules.paging import blocks_of, query_spans
from paged_mla_shared.backend import Runner
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem


def _cut(batch: Batch, longest: int) -> Batch:
    """Return a step with rows of at most `longest` keys, but at least as many as their queries."""
    lengths = np.maximum(
        np.minimum(batch.seq_lens, longest), np.where(batch.seq_lens > 0, batch.query_lens, 0)
    )
    return replace(batch, seq_lens=lengths.astype(np.int32))


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="vllm@trtllm_mla transformers#45323")
class TheLongestRowIsThatOfTheFirstStep(ForwardingRunner):
    """The maximum length of the first step limits the rows of every later step."""

    longest: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Limit rows to the length of the first step's longest row."""
        if self.longest is None:
            self.longest = int(batch.seq_lens.max(initial=1))
        return self.inner.attend(_cut(batch, max(self.longest, 1)))


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS)
class SplitsAreCountedInTheFirstStep(ForwardingRunner):
    """Rows are limited to the splits of 1024 keys that the first step's longest row needed."""

    splits: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Limit rows to the splits of the first step."""
        if self.splits is None:
            self.splits = blocks_of(int(batch.seq_lens.max(initial=1)), 1024)
        return self.inner.attend(_cut(batch, max(self.splits, 1) * 1024))


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="rtp-llm#1181 vllm#36492")
class LengthsAreThoseOfTheFirstStep(ForwardingRunner):
    """The lengths of the first step limit rows of later steps with the same number of rows."""

    first: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Limit rows to the first step's lengths, but to at least as many keys as queries."""
        if self.first is None:
            self.first = batch.seq_lens.copy()
        if len(self.first) == len(batch.seq_lens):
            kept = np.maximum(np.minimum(self.first, batch.seq_lens), batch.query_lens)
            kept *= batch.seq_lens > 0  # padded rows may have queries
            batch = replace(batch, seq_lens=kept.astype(np.int32))
        return self.inner.attend(batch)


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="tokenspeed#840")
class AnIdleCaptureStaysEmpty(ForwardingRunner):
    """If the first step has only padded rows, later steps get an empty output."""

    idle: bool | None = None

    def attend(self, batch: Batch) -> Output:
        """Return an empty output after an idle first step."""
        if self.idle is None:
            self.idle = not batch.seq_lens.any()
        answer = self.inner.attend(batch)
        if self.idle:
            answer.out[:], answer.lse[:] = 0, -np.inf
        return answer


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="sglang#28569")
class RowsPastTheFirstStepsAreNotServed(ForwardingRunner):
    """The number of rows of the first step limits every later step."""

    rows: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Return an empty output for later rows."""
        self.rows = batch.num_rows if self.rows is None else self.rows
        answer = self.inner.attend(batch)
        if batch.num_rows > self.rows:
            start = int(batch.cu_seqlens_q[self.rows])
            answer.out[start:], answer.lse[start:] = 0, -np.inf
        return answer


def _unanswered_past(answer: Output, batch: Batch, count: int) -> Output:
    """Empty the output after the first `count` queries of each row, in place, and return it."""
    for span in query_spans(batch):
        answer.out[span][count:] = 0
        answer.lse[span][count:] = -np.inf
    return answer


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="sglang#30805", akin="vllm#45227")
class QueriesPastTheFirstStepsAreNotServed(ForwardingRunner):
    """The largest number of query tokens of a row of the first step limits later steps."""

    longest: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Return an empty output for later tokens of a row."""
        if self.longest is None:
            self.longest = int(batch.query_lens.max(initial=1))
        return _unanswered_past(self.inner.attend(batch), batch, self.longest)


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS)
class QueryTilesAreCountedInTheFirstStep(ForwardingRunner):
    """Queries of a row are limited to the tiles of 32 that the first step's rows needed."""

    tiles: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Return an empty output for later tiles."""
        if self.tiles is None:
            self.tiles = blocks_of(int(batch.query_lens.max(initial=1)), 32)
        return _unanswered_past(self.inner.attend(batch), batch, max(self.tiles, 1) * 32)


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, cites="sglang#21987 sglang#27545 ATOM#1391")
class QueryLengthsAreThoseOfTheFirstStep(ForwardingRunner):
    """Later steps with equally many tokens and rows use the query lengths of the first step."""

    ends: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Use the first step's prefix sums of queries."""
        if self.ends is None:
            self.ends = batch.cu_seqlens_q.copy()
        alike = len(self.ends) == len(batch.cu_seqlens_q)
        alike = alike and self.ends[-1] == batch.cu_seqlens_q[-1]
        if alike and (np.diff(self.ends) <= batch.seq_lens).all():
            batch = replace(batch, cu_seqlens_q=self.ends)
        return self.inner.attend(batch)


@runner_fault(FaultClass.STALE, *SHOWS, cites="sglang#26655 vllm#35175 rtp-llm#1259")
class TheTableIsThatOfTheFirstStep(ForwardingRunner):
    """Later steps use the block table of the first step, if it is large enough."""

    table: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Read keys through the first step's table."""
        if self.table is None:
            self.table = batch.block_table.copy()
        blocks = -(-batch.seq_lens // self.problem.block_size)
        rows, width = self.table.shape
        fits = rows >= batch.num_rows and width >= blocks.max(initial=0)
        if (
            fits
            and (self.table[: batch.num_rows] < self.problem.num_blocks)[
                np.arange(width) < blocks[:, None]
            ].all()
        ):
            batch = replace(batch, block_table=self.table[: batch.num_rows])
        return self.inner.attend(batch)


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, "S-1")
class TheWidthOfTheTableIsThatOfTheFirstStep(ForwardingRunner):
    """The block table of every step is read with the width of the first step's table."""

    width: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Read rows of the table with the first step's stride."""
        rows, width = batch.block_table.shape
        if self.width is None:
            self.width = width
        places = np.arange(rows)[:, None] * self.width + np.arange(width)
        read = batch.block_table.ravel()[places % max(rows * width, 1)]
        return self.inner.attend(replace(batch, block_table=read % self.problem.num_blocks))


@runner_fault(FaultClass.HOST_SCALAR, "S-17", "S-10", cites="tokenspeed#667 TensorRT-LLM#17110")
class WriteSlotsAreThoseOfTheFirstStep(ForwardingRunner):
    """Later steps with equally many tokens write the slots of the first step."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Write to the first step's slots."""
        if self.slots is None:
            self.slots = self.inner.plan(batch).slot_mapping
        if len(self.slots) == batch.num_tokens and batch.slot_mapping is None:
            batch = replace(batch, slot_mapping=self.slots)
        self.inner.append(batch)


@runner_fault(FaultClass.HOST_SCALAR, "S-17", "S-10", cites="TensorRT-LLM#17110")
class ReplayedAppendsServeOneToken(ForwardingRunner):
    """In later steps, rows of several tokens are written to slots of the first step."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Use the first step's slots for tokens of rows of several tokens."""
        slots = self.inner.plan(batch).slot_mapping.copy()
        if self.slots is None:
            self.slots = slots
        elif batch.slot_mapping is None:
            several = np.flatnonzero(of_rows(batch, batch.query_lens > 1))
            several = several[several < len(self.slots)]
            several = several[~np.isin(self.slots[several], slots)]
            slots[several] = self.slots[several]
            batch = replace(batch, slot_mapping=slots)
        self.inner.append(batch)


@runner_fault(FaultClass.HOST_SCALAR, "S-11", "S-17")
class QueryScalesAreThoseOfTheFirstStep(ForwardingRunner):
    """The query scale of the first step is used in every later step."""

    steps = 0
    scale: float | None = None

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Use the first step's scale."""
        self.scale = self.scale if self.steps else scale
        self.steps += 1
        return self.inner.quantize_queries(batch, self.scale)


@runner_fault(FaultClass.HOST_SCALAR, "S-11", "S-12", "S-17")
class QueryPositionsAreThoseOfTheFirstStep(ForwardingRunner):
    """8-bit queries are rotated by positions that follow the lengths of the first step."""

    lengths: NDArray[np.int32] | None = None

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Limit rows to the first step's lengths, but to at least as many keys as queries."""
        if self.lengths is None:
            self.lengths = batch.seq_lens.copy()
        if len(self.lengths) == batch.num_rows:
            kept = np.minimum(self.lengths, batch.seq_lens)
            fewest = np.where(batch.seq_lens > 0, batch.query_lens, 0)
            batch = replace(batch, seq_lens=np.maximum(kept, fewest).astype(np.int32))
        return self.inner.quantize_queries(batch, scale)


class _WrongInReplay(ForwardingRunner):
    """The first step is right; later steps have a fault of a kernel."""

    fault: Fault
    steps = 0

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        self.wrong = ReferenceRunner(problem, self.fault.change(RIGHT))

    def load_cache(self, image: CacheImage) -> None:
        """Load into both runners."""
        self.inner.load_cache(image)
        self.wrong.load_cache(image)

    def append(self, batch: Batch) -> None:
        """Append with both runners."""
        self.inner.append(batch)
        self.wrong.append(batch)

    def attend(self, batch: Batch) -> Output:
        """Use the wrong runner from the second step on."""
        self.steps += 1
        return (self.inner if self.steps == 1 else self.wrong).attend(batch)


@runner_fault(FaultClass.CAUSAL, *SHOWS, cites="tokenspeed#258 tokenspeed#260 tokenspeed#616")
class ReplaysAreNotCausal(_WrongInReplay):
    """Steps after the first one are computed without a causal mask."""

    fault = visibility.the_future_is_seen
