"""Runners that keep something of an earlier step, as graphs and workspaces do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.passing import Passing
from paged_mla_reference.backend import ReferenceRunner
from paged_mla_reference.deviations import ORACLE, Deviation, Fault
from paged_mla_reference.deviations.change import of_rows, wide_table
from paged_mla_reference.deviations.deviation import breaks
from paged_mla_reference.oracle import RIGHT
from paged_mla_reference.paging import query_spans
from paged_mla_shared.backend import Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem

SHOWS = ("S-17", "S-4", "S-5", "S-6", "S-7", "S-9")  # how a stale value shows in an answer


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="vllm@trtllm_mla transformers#45323")
class TheLongestRowIsThatOfTheFirstStep(Passing):
    """The maximum length recorded at capture bounds every later row."""

    longest: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Cut rows to the first step's longest."""
        if self.longest is None:
            self.longest = int(batch.seq_lens.max(initial=1))
        cut = np.minimum(batch.seq_lens, max(self.longest, 1))
        lengths = np.maximum(cut, np.where(batch.seq_lens > 0, batch.query_lens, 0))
        return self.inner.attend(replace(batch, seq_lens=lengths.astype(np.int32)))


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="rtp-llm#1181 vllm#36492")
class LengthsAreThoseOfTheFirstStep(Passing):
    """Lengths recorded at capture stay, where the batch is as large."""

    first: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Take the first step's lengths, none longer than what is cached."""
        if self.first is None:
            self.first = batch.seq_lens.copy()
        if len(self.first) == len(batch.seq_lens):
            kept = np.minimum(self.first, batch.seq_lens)
            batch = replace(batch, seq_lens=np.maximum(kept, batch.query_lens).astype(np.int32))
        return self.inner.attend(batch)


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="tokenspeed#840")
class AnIdleCaptureStaysEmpty(Passing):
    """A schedule recorded over padded rows alone stays empty."""

    idle: bool | None = None

    def attend(self, batch: Batch) -> Output:
        """Serve nobody after an idle first step."""
        if self.idle is None:
            self.idle = not batch.seq_lens.any()
        answer = self.inner.attend(batch)
        if self.idle:
            answer.out[:], answer.lse[:] = 0, -np.inf
        return answer


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="sglang#28569")
class RowsPastTheFirstStepsAreNotServed(Passing):
    """The number of rows recorded at capture bounds every later batch."""

    rows: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Leave later rows unanswered."""
        self.rows = batch.num_rows if self.rows is None else self.rows
        answer = self.inner.attend(batch)
        if batch.num_rows > self.rows:
            start = int(batch.cu_seqlens_q[self.rows])
            answer.out[start:], answer.lse[start:] = 0, -np.inf
        return answer


@breaks(Fault.HOST_SCALAR, "S-17", "S-10", cites="tokenspeed#667 TensorRT-LLM#17110")
class WriteSlotsAreThoseOfTheFirstStep(Passing):
    """Slots baked in at capture are written again, where as many tokens come."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Write to the first step's slots."""
        if self.slots is None:
            self.slots = self.inner.plan(batch).slot_mapping
        if len(self.slots) == batch.num_tokens and batch.slot_mapping is None:
            batch = replace(batch, slot_mapping=self.slots)
        self.inner.append(batch)


@breaks(Fault.HOST_SCALAR, "S-17", "S-10", cites="TensorRT-LLM#17110")
class ReplayedAppendsServeOneToken(Passing):
    """In a replay, rows of several tokens are written where those of the first step were."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Take the first step's slots for tokens of longer rows."""
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


@breaks(Fault.PAD_VALUE, "S-9", "S-10", "S-17", cites="vllm-ascend#15417 vllm-ascend#15492")
class PaddedTokensKeepTheirLastSlots(Passing):
    """Slots of padding become -1 after they were copied: what lies there is written."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Write padded tokens to the slots that the step before had in their places."""
        slots = self.inner.plan(batch).slot_mapping.copy()
        before = np.full_like(slots, -1)
        if self.slots is not None:
            shared = min(len(slots), len(self.slots))
            before[:shared] = self.slots[:shared]
        self.slots = slots.copy()
        if batch.slot_mapping is None:
            stale = (slots < 0) & ~np.isin(before, slots)
            slots[stale] = before[stale]
            batch = replace(batch, slot_mapping=slots)
        self.inner.append(batch)


@breaks(Fault.STALE, *SHOWS, cites="sglang#26655 vllm#35175 rtp-llm#1259")
class TheTableIsThatOfTheFirstStep(Passing):
    """A block table reallocated after capture is not seen, where it is large enough."""

    table: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Read through the first step's table."""
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


@breaks(Fault.HOST_SCALAR, *SHOWS, "S-14")
class TreesAreKnownByTheirLengths(Passing):
    """A mask is read again only if the lengths of the rows are other ones."""

    known: tuple[bytes, bytes] | None = None
    mask: NDArray[Any] | None = None

    def attend(self, batch: Batch) -> Output:
        """Take the mask of the last step that had other lengths."""
        if self.problem.mask is not Mask.TREE or batch.mask is None:
            return self.inner.attend(batch)
        lengths = batch.seq_lens.tobytes(), batch.cu_seqlens_q.tobytes()
        if self.known != lengths:
            self.known, self.mask = lengths, batch.mask
        return self.inner.attend(replace(batch, mask=self.mask))


@breaks(Fault.STALE, *SHOWS, "S-14", cites="sglang#37120 sglang#37553")
class TrueCellsOfAnEarlierMaskStay(Passing):
    """A mask buffer is grown and never cleared."""

    cells: NDArray[np.bool_] | None = None

    def attend(self, batch: Batch) -> Output:
        """Keep what any earlier mask allowed, among nodes that come before."""
        if self.problem.mask is not Mask.TREE or batch.mask is None:
            return self.inner.attend(batch)
        if self.cells is not None and self.problem.mask_spelling == "qlen":
            mask = batch.mask.copy()
            shared = min(len(mask), len(self.cells))
            mask[:shared] |= self.cells[:shared]
            lower = [np.tril(np.ones((n, n), bool)).ravel() for n in batch.query_lens]
            batch = replace(batch, mask=mask & np.concatenate([np.zeros(0, bool), *lower]))
        assert batch.mask is not None
        self.cells = batch.mask
        return self.inner.attend(batch)


@breaks(Fault.STALE, "S-17", "S-5", "S-6", "S-9", cites="flashinfer#3047 sglang#22291")
class EmptyRowsKeepTheAnswerBefore(Passing):
    """Queries that see nothing leave the output buffer as an earlier step left it."""

    before: Output | None = None

    def attend(self, batch: Batch) -> Output:
        """Answer with old rows where nothing is visible."""
        answer = self.inner.attend(batch)
        if self.before is not None:
            rows = min(len(answer.out), len(self.before.out))
            empty = np.isneginf(answer.lse[:rows])
            answer.out[:rows][empty] = self.before.out[:rows][empty]
        self.before = Output(answer.out.copy(), answer.lse.copy())
        return answer


@breaks(Fault.STALE, "S-17", "S-5", "S-6", "S-7", "S-9", cites="vllm@FLASHMLA flashinfer#4002")
class TheLastRowOfASmallerBatchIsStale(Passing):
    """Metadata of a larger step serves a smaller one, whose last row gets its old answer."""

    before: Output | None = None
    rows = 0

    def attend(self, batch: Batch) -> Output:
        """Repeat the old answer of the last row."""
        answer = self.inner.attend(batch)
        if self.before is not None and 0 < batch.num_rows < self.rows and len(answer.out):
            last = int(batch.cu_seqlens_q[-1]) - 1
            answer.out[last] = self.before.out[min(last, len(self.before.out) - 1)]
        self.before = Output(answer.out.copy(), answer.lse.copy())
        self.rows = batch.num_rows
        return answer


@breaks(Fault.STALE, "S-17", "S-5", "S-6", cites="flashinfer#3465 flashinfer#3582")
class SplitAccumulatorsAreNotZeroed(Passing):
    """Partial sums of the step before are still in the workspace."""

    left: NDArray[np.float32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Add what the last step left to token 0."""
        answer = self.inner.attend(batch)
        if len(answer.out):
            left = answer.out[0].copy()
            if self.left is not None:
                answer.out[0] += self.left
            self.left = left
        return answer


@breaks(Fault.STALE, "S-17", cites="vllm#53488 vllm#53520")
class AnswersShareOneBuffer(Passing):
    """The next answer is written over the last one."""

    buffer: NDArray[np.float32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Answer in place."""
        answer = self.inner.attend(batch)
        if self.buffer is None:
            shape = (self.problem.max_query_tokens, *answer.out.shape[1:])
            self.buffer = np.zeros(shape, answer.out.dtype)
        self.buffer[: len(answer.out)] = answer.out
        return Output(self.buffer[: len(answer.out)], answer.lse)


@breaks(Fault.STALE, "S-17", "S-10", "S-5", cites="vllm#47930 sglang#19177")
class TheSecondCacheIsNotTaken(Passing):
    """A cache restored after the first one does not arrive."""

    loaded = 0

    def load_cache(self, image: CacheImage) -> None:
        """Load the first cache only."""
        self.loaded += 1
        if self.loaded == 1:
            self.inner.load_cache(image)


@breaks(Fault.STALE, *SHOWS, cites="vllm-tt-plugin#103 vllm-tt-plugin#104")
class TableTailsOfAnEarlierStepStay(Passing):
    """Rows move with their number of blocks only; a longer row before leaves its tail in use."""

    blocks: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Read as many blocks as the row before had."""
        lengths = batch.seq_lens.copy()
        if self.blocks is not None:
            rows = min(len(self.blocks), batch.num_rows)
            single = (batch.query_lens[:rows] == 1) & (lengths[:rows] > 0)
            longer = np.minimum(self.blocks[:rows], batch.block_table.shape[1])
            reach = np.minimum(longer * self.problem.block_size, self.problem.max_model_len)
            lengths[:rows] = np.where(single, np.maximum(lengths[:rows], reach), lengths[:rows])
        self.blocks = -(-batch.seq_lens // self.problem.block_size)
        return self.inner.attend(replace(batch, seq_lens=lengths.astype(np.int32)))


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="sglang#21987 sglang#27545 ATOM#1391")
class QueryLengthsAreThoseOfTheFirstStep(Passing):
    """A step with as many tokens and rows is cut into the queries of the first one."""

    ends: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Cut the tokens where the first step did."""
        if self.ends is None:
            self.ends = batch.cu_seqlens_q.copy()
        alike = len(self.ends) == len(batch.cu_seqlens_q)
        alike = alike and self.ends[-1] == batch.cu_seqlens_q[-1]
        if alike and (np.diff(self.ends) <= batch.seq_lens).all():
            batch = replace(batch, cu_seqlens_q=self.ends)
        return self.inner.attend(batch)


@breaks(Fault.HOST_SCALAR, *SHOWS, cites="sglang#30805", akin="vllm#45227")
class QueriesPastTheFirstStepsAreNotServed(Passing):
    """Counters are sized for the query tokens that a row of the first step has."""

    longest: int | None = None

    def attend(self, batch: Batch) -> Output:
        """Leave later tokens of a row unanswered."""
        if self.longest is None:
            self.longest = int(batch.query_lens.max(initial=1))
        answer = self.inner.attend(batch)
        for span in query_spans(batch):
            answer.out[span][self.longest :] = 0
            answer.lse[span][self.longest :] = -np.inf
        return answer


@breaks(Fault.STALE, *SHOWS, cites="vllm-ascend#7290", akin="vllm-ascend#8107")
class ThePaddedLastRowIsThatBefore(Passing):
    """Padding is copied one row short: a padded last row is what lay there a step before."""

    before: Batch | None = None

    def attend(self, batch: Batch) -> Output:
        """Let a padded last row keep the length and the table of the row in its place."""
        before, self.before = self.before, batch
        last = batch.num_rows - 1
        if before is None or not 0 <= last < before.num_rows or batch.seq_lens[last]:
            return self.inner.attend(batch)
        width = before.block_table.shape[1]
        table, lengths = wide_table(batch, 1, width).block_table.copy(), batch.seq_lens.copy()
        if before.seq_lens[last] >= batch.query_lens[last]:
            table[last, :width], lengths[last] = before.block_table[last], before.seq_lens[last]
        return self.inner.attend(replace(batch, block_table=table, seq_lens=lengths))


@breaks(Fault.STALE, *SHOWS, "S-10")
class TheLastPlanServesEveryStep(Passing):
    """Lengths and tables of the last plan are used, where as many rows and tokens come."""

    planned: Batch | None = None

    def plan(self, batch: Batch) -> Metadata:
        """Keep the batch."""
        found = self.inner.plan(batch)
        self.planned = batch
        return found

    def append(self, batch: Batch) -> None:
        """Write where the planned step would."""
        self.inner.append(_as_planned(batch, self.planned))

    def attend(self, batch: Batch) -> Output:
        """Read what the planned step would."""
        return self.inner.attend(_as_planned(batch, self.planned))


def _as_planned(batch: Batch, plan: Batch | None) -> Batch:
    """Return a step with the lengths and tables of a planned one, if it is as large."""
    if plan is None or plan.num_rows != batch.num_rows or plan.num_tokens != batch.num_tokens:
        return batch
    names = ("cu_seqlens_q", "seq_lens", "block_table", "mask")
    return replace(batch, **{name: getattr(plan, name) for name in names})


class _PlansLieInTheProcess(Passing):
    """Runners that differ in scales and ropes alone plan into the same buffers."""

    plans: ClassVar[dict[Problem, Batch]] = {}

    def plan(self, batch: Batch) -> Metadata:
        """Keep the batch for all of them."""
        found = self.inner.plan(batch)
        self.plans[self._key] = batch
        return found

    def _as_planned(self, batch: Batch) -> Batch:
        return _as_planned(batch, self.plans.get(self._key))

    @property
    def _key(self) -> Problem:
        return replace(self.problem, softmax_scale=1.0, cache_scale=1.0, rope=None)


@breaks(Fault.STALE, "S-17", "S-1", "S-5")
class GathersFollowTheLastPlan(_PlansLieInTheProcess):
    """Context is gathered by the plan that was made last, whichever runner made it."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather what the planned step has."""
        return self.inner.gather_context(self._as_planned(batch))


@breaks(Fault.STALE, "S-17", "S-11", "S-12")
class QueriesFollowTheLastPlan(_PlansLieInTheProcess):
    """Queries of 8 bits are rotated by the plan that was made last, whichever runner made it."""

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Take the planned step's positions."""
        return self.inner.quantise_queries(self._as_planned(batch), scale)


@breaks(Fault.STALE, *SHOWS, "S-10", "S-21")
class LayersFollowTheLastPlan(_PlansLieInTheProcess):
    """Layers run by the plan that was made last, whichever runner made it."""

    def layer(self, batch: LayerBatch) -> Output:
        """Answer the planned step."""
        return self.inner.layer(replace(batch, step=self._as_planned(batch.step)))


@breaks(Fault.HOST_SCALAR, "S-11", "S-17")
class QueryScalesAreThoseOfTheFirstStep(Passing):
    """The scale given at capture divides the queries of every later step."""

    steps = 0
    scale: float | None = None

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Take the first step's scale."""
        self.scale = self.scale if self.steps else scale
        self.steps += 1
        return self.inner.quantise_queries(batch, self.scale)


@breaks(Fault.HOST_SCALAR, "S-11", "S-12", "S-17")
class QueryPositionsAreThoseOfTheFirstStep(Passing):
    """Queries of 8 bits are rotated by the lengths recorded at capture."""

    lengths: NDArray[np.int32] | None = None

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Take the first step's lengths, none longer than what is cached."""
        if self.lengths is None:
            self.lengths = batch.seq_lens.copy()
        if len(self.lengths) == batch.num_rows:
            kept = np.minimum(self.lengths, batch.seq_lens)
            fewest = np.where(batch.seq_lens > 0, batch.query_lens, 0)
            batch = replace(batch, seq_lens=np.maximum(kept, fewest).astype(np.int32))
        return self.inner.quantise_queries(batch, scale)


@breaks(Fault.STALE, "S-11", *SHOWS, "S-10", cites="sglang#26982", akin="vllm#38652")
class ScalesStayWhenTokensMove(Passing):
    """Tokens come to other blocks, and the scales of these stay."""

    moved = False

    def load_cache(self, image: CacheImage) -> None:
        """Load rows, and scales for the first time only."""
        layout, blocks = image.layout, image.blocks.copy()
        if self.moved:
            there = self.inner.read_cache(image.block_ids)
            layout.scales(blocks)[...] = layout.scales(there)
        self.moved = True
        self.inner.load_cache(replace(image, blocks=blocks))


class _WrongInReplay(Passing):
    """The first step is right; the steps after it have a deviation of the oracle."""

    deviation: Deviation
    steps = 0

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        self.wrong = ReferenceRunner(problem, self.deviation.change(RIGHT))

    def load_cache(self, image: CacheImage) -> None:
        """Load into both."""
        self.inner.load_cache(image)
        self.wrong.load_cache(image)

    def append(self, batch: Batch) -> None:
        """Append to both."""
        self.inner.append(batch)
        self.wrong.append(batch)

    def attend(self, batch: Batch) -> Output:
        """Ask the wrong one from the second step on."""
        self.steps += 1
        return (self.inner if self.steps == 1 else self.wrong).attend(batch)


@breaks(Fault.CAUSAL, *SHOWS, cites="tokenspeed#258 tokenspeed#260 tokenspeed#616")
class ReplaysAreNotCausal(_WrongInReplay):
    """A graph of several query tokens was captured without a causal mask."""

    deviation = ORACLE["the-future-is-seen"]


@breaks(Fault.STALE, "S-17", "S-21")
class WeightsOfTheFirstLayerServeAll(Passing):
    """What a runner makes of kv_b_proj is made once, whatever layer comes next."""

    weights: NDArray[Any] | None = None

    def layer(self, batch: LayerBatch) -> Output:
        """Answer with the weights that came first."""
        if self.weights is None:
            self.weights = batch.kv_b_proj.copy()
        return self.inner.layer(replace(batch, kv_b_proj=self.weights))
