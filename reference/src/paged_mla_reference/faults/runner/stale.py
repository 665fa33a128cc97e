"""Runners that keep data of an earlier step, as buffers and workspaces do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, runner_fault
from paged_mla_reference.faults.kernel.change import wide_table
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.paging import used_blocks
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem

SHOWS = ("S-17", "S-4", "S-5", "S-6", "S-7", "S-9")  # rules that detect a stale value


def blocks_of_rows(batch: Batch, block_size: int) -> list[NDArray[np.int64]]:
    """Return the table entries that each row uses."""
    return [used_blocks(batch, row, block_size) for row in range(batch.num_rows)]


def with_blocks(batch: Batch, blocks: Sequence[NDArray[np.int64]]) -> Batch:
    """Return a step whose rows have other blocks, cut to the width of its table."""
    table = batch.block_table.copy()
    for row, ids in enumerate(blocks):
        table[row, : len(ids)] = ids[: table.shape[1]]
    return replace(batch, block_table=table)


@runner_fault(
    FaultClass.PAD_VALUE, "S-9", "S-10", "S-17", cites="vllm-ascend#15417 vllm-ascend#15492"
)
class PaddedTokensKeepTheirLastSlots(ForwardingRunner):
    """Padded tokens keep the slots of the step before, and are written to them."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Write padded tokens to the slots that the step before had at their indices."""
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


@runner_fault(FaultClass.STALE, "S-17", "S-9", "S-10")
class LongerStepsLeaveTheirSlots(ForwardingRunner):
    """After a longer step, the last token is also written to the remaining slots of that step."""

    slots: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Append, and write the last token to each remaining slot."""
        self.inner.append(batch)
        slots = batch.slot_mapping
        if slots is None:
            slots = self.inner.plan(batch).slot_mapping
        left = np.zeros(0, np.int64) if self.slots is None else self.slots[len(slots) :]
        self.slots = slots.copy()
        if not len(slots) or slots[-1] < 0:
            return
        for slot in left[left >= 0].tolist():
            named = np.full_like(slots, -1)
            named[-1] = slot
            self.inner.append(replace(batch, slot_mapping=named))


@runner_fault(FaultClass.STALE, *SHOWS, "S-14", cites="sglang#37120 sglang#37553")
class TrueCellsOfAnEarlierMaskStay(ForwardingRunner):
    """A mask buffer is not cleared, so that nodes also see what an earlier mask allowed."""

    cells: NDArray[np.bool_] | None = None

    def attend(self, batch: Batch) -> Output:
        """Add the elements of earlier masks, for earlier nodes."""
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


@runner_fault(FaultClass.STALE, "S-17", "S-5", "S-6", "S-9", cites="flashinfer#3047 sglang#22291")
class EmptyRowsKeepTheAnswerBefore(ForwardingRunner):
    """Queries without visible keys keep the output of an earlier step."""

    before: Output | None = None

    def attend(self, batch: Batch) -> Output:
        """Return the output of the step before for queries without visible keys."""
        answer = self.inner.attend(batch)
        if self.before is not None:
            rows = min(len(answer.out), len(self.before.out))
            empty = np.isneginf(answer.lse[:rows])
            answer.out[:rows][empty] = self.before.out[:rows][empty]
        self.before = Output(answer.out.copy(), answer.lse.copy())
        return answer


@runner_fault(FaultClass.STALE, "S-17", "S-5", "S-6", "S-9")
class PaddedTokensKeepOldAnswersFromTheThirdStep(ForwardingRunner):
    """From the third step on, padded tokens keep the output of the step before."""

    steps = 0
    before: Output | None = None

    def attend(self, batch: Batch) -> Output:
        """Return the output of the step before for padded tokens at the end."""
        answer = self.inner.attend(batch)
        self.steps += 1
        if self.before is not None and self.steps >= 3:
            padded = slice(int(batch.cu_seqlens_q[-1]), min(len(answer.out), len(self.before.out)))
            answer.out[padded], answer.lse[padded] = (
                self.before.out[padded],
                self.before.lse[padded],
            )
        self.before = Output(answer.out.copy(), answer.lse.copy())
        return answer


@runner_fault(
    FaultClass.STALE, "S-17", "S-5", "S-6", "S-7", "S-9", cites="vllm@FLASHMLA flashinfer#4002"
)
class TheLastRowOfASmallerBatchIsStale(ForwardingRunner):
    """After a step with more rows, the last token of a step keeps an earlier output."""

    before: Output | None = None
    rows = 0

    def attend(self, batch: Batch) -> Output:
        """Return the output of the step before for the last token."""
        answer = self.inner.attend(batch)
        if self.before is not None and 0 < batch.num_rows < self.rows and len(answer.out):
            last = int(batch.cu_seqlens_q[-1]) - 1
            answer.out[last] = self.before.out[min(last, len(self.before.out) - 1)]
        self.before = Output(answer.out.copy(), answer.lse.copy())
        self.rows = batch.num_rows
        return answer


@runner_fault(FaultClass.STALE, "S-17", "S-5", "S-6", cites="flashinfer#3465 flashinfer#3582")
class SplitAccumulatorsAreNotZeroed(ForwardingRunner):
    """The workspace is not cleared: the output of token 0 includes that of the step before."""

    left: NDArray[np.float32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Add the output of the step before to that of token 0."""
        answer = self.inner.attend(batch)
        if len(answer.out):
            left = answer.out[0].copy()
            if self.left is not None:
                answer.out[0] += self.left
            self.left = left
        return answer


@runner_fault(FaultClass.STALE, "S-17", cites="vllm#53488 vllm#53520")
class AnswersShareOneBuffer(ForwardingRunner):
    """All steps return the same buffer, so that a step overwrites earlier outputs."""

    buffer: NDArray[np.float32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Return the output in the buffer."""
        answer = self.inner.attend(batch)
        if self.buffer is None:
            shape = (self.problem.max_query_tokens, *answer.out.shape[1:])
            self.buffer = np.zeros(shape, answer.out.dtype)
        self.buffer[: len(answer.out)] = answer.out
        return Output(self.buffer[: len(answer.out)], answer.lse)


@runner_fault(FaultClass.STALE, "S-17", "S-10", "S-5", cites="vllm#47930 sglang#19177")
class TheSecondCacheIsNotTaken(ForwardingRunner):
    """Only the first cache is loaded; later loads are ignored."""

    loaded = 0

    def load_cache(self, image: CacheImage) -> None:
        """Load the first cache only."""
        self.loaded += 1
        if self.loaded == 1:
            self.inner.load_cache(image)


@runner_fault(FaultClass.STALE, *SHOWS, cites="vllm-tt-plugin#103 vllm-tt-plugin#104")
class TableTailsOfAnEarlierStepStay(ForwardingRunner):
    """Decode rows read as many blocks as the row at their index had in the step before."""

    blocks: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Read as many blocks as in the step before, if that is more."""
        lengths = batch.seq_lens.copy()
        if self.blocks is not None:
            rows = min(len(self.blocks), batch.num_rows)
            single = (batch.query_lens[:rows] == 1) & (lengths[:rows] > 0)
            longer = np.minimum(self.blocks[:rows], batch.block_table.shape[1])
            reach = np.minimum(longer * self.problem.block_size, self.problem.max_model_len)
            lengths[:rows] = np.where(single, np.maximum(lengths[:rows], reach), lengths[:rows])
        self.blocks = -(-batch.seq_lens // self.problem.block_size)
        return self.inner.attend(replace(batch, seq_lens=lengths.astype(np.int32)))


@runner_fault(FaultClass.STALE, *SHOWS)
class ShorterRowsKeepTheirTableFromTheThirdStep(ForwardingRunner):
    """From the third step on, a row with fewer blocks than in the step before keeps its table."""

    steps = 0
    blocks: Sequence[NDArray[np.int64]] = ()

    def attend(self, batch: Batch) -> Output:
        """Read the blocks of longer rows of the step before."""
        self.steps += 1
        blocks = blocks_of_rows(batch, self.problem.block_size)
        if self.steps >= 3:
            for row, (now, before) in enumerate(zip(blocks, self.blocks, strict=False)):
                blocks[row] = before if 0 < len(now) < len(before) else now
        self.blocks = blocks
        return self.inner.attend(with_blocks(batch, blocks))


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS)
class RowsThatGrewByOneKeepTheirLength(ForwardingRunner):
    """A decode row that is one token longer than in the step before does not see that token."""

    before: NDArray[np.int32] | None = None

    def attend(self, batch: Batch) -> Output:
        """Use the old lengths of these rows, except in steps with tree masks."""
        lengths = batch.seq_lens.copy()
        if self.before is not None and self.problem.mask is not Mask.TREE:
            rows = min(len(lengths), len(self.before))
            late = (self.before[:rows] > 0) & (lengths[:rows] == self.before[:rows] + 1)
            lengths[:rows] -= late & (batch.query_lens[:rows] == 1)
        self.before = batch.seq_lens.copy()
        return self.inner.attend(replace(batch, seq_lens=lengths))


@runner_fault(FaultClass.STALE, *SHOWS, cites="vllm-ascend#7290", akin="vllm-ascend#8107")
class ThePaddedLastRowIsThatBefore(ForwardingRunner):
    """A padded last row keeps the length and the table that it had in the step before."""

    before: Batch | None = None

    def attend(self, batch: Batch) -> Output:
        """Use the length and the table of the step before for a padded last row."""
        before, self.before = self.before, batch
        last = batch.num_rows - 1
        if before is None or not 0 <= last < before.num_rows or batch.seq_lens[last]:
            return self.inner.attend(batch)
        width = before.block_table.shape[1]
        table, lengths = wide_table(batch, 1, width).block_table.copy(), batch.seq_lens.copy()
        if before.seq_lens[last] >= batch.query_lens[last]:
            table[last, :width], lengths[last] = before.block_table[last], before.seq_lens[last]
        return self.inner.attend(replace(batch, block_table=table, seq_lens=lengths))


@runner_fault(FaultClass.STALE, *SHOWS, "S-10")
class TheLastPlanServesEveryStep(ForwardingRunner):
    """Steps use the lengths and tables of the last plan if it has equally many rows and tokens."""

    planned: Batch | None = None

    def plan(self, batch: Batch) -> Metadata:
        """Plan, and keep the batch."""
        found = self.inner.plan(batch)
        self.planned = batch
        return found

    def append(self, batch: Batch) -> None:
        """Append with the planned step's lengths and tables."""
        self.inner.append(_as_planned(batch, self.planned))

    def attend(self, batch: Batch) -> Output:
        """Attend with the planned step's lengths and tables."""
        return self.inner.attend(_as_planned(batch, self.planned))


def _as_planned(batch: Batch, plan: Batch | None) -> Batch:
    """Return a step with the lengths and tables of a planned step of the same size."""
    if plan is None or plan.num_rows != batch.num_rows or plan.num_tokens != batch.num_tokens:
        return batch
    names = ("cu_seqlens_q", "seq_lens", "block_table", "mask")
    return replace(batch, **{name: getattr(plan, name) for name in names})


class _PlansLieInTheProcess(ForwardingRunner):
    """Runners that differ only in scales and ropes share the buffers of plans."""

    plans: ClassVar[dict[Problem, Batch]] = {}

    def plan(self, batch: Batch) -> Metadata:
        """Plan, and keep the batch for all these runners."""
        found = self.inner.plan(batch)
        self.plans[self._key] = batch
        return found

    def _as_planned(self, batch: Batch) -> Batch:
        return _as_planned(batch, self.plans.get(self._key))

    @property
    def _key(self) -> Problem:
        return replace(self.problem, softmax_scale=1.0, cache_scale=1.0, rope=None)


@runner_fault(FaultClass.STALE, "S-17", "S-1", "S-5")
class GathersFollowTheLastPlan(_PlansLieInTheProcess):
    """Gathers use the last plan, even if another runner made it."""

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather with the planned step."""
        return self.inner.gather_context(self._as_planned(batch))


@runner_fault(FaultClass.STALE, "S-17", "S-11", "S-12")
class QueriesFollowTheLastPlan(_PlansLieInTheProcess):
    """8-bit queries are rotated by the last plan, even if another runner made it."""

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Use the planned step's positions."""
        return self.inner.quantize_queries(self._as_planned(batch), scale)


@runner_fault(FaultClass.STALE, *SHOWS, "S-10", "S-21")
class LayersFollowTheLastPlan(_PlansLieInTheProcess):
    """Layers use the last plan, even if another runner made it."""

    def layer(self, batch: LayerBatch) -> Output:
        """Run the planned step."""
        return self.inner.layer(replace(batch, step=self._as_planned(batch.step)))


@runner_fault(FaultClass.STALE, "S-11", *SHOWS, "S-10", cites="sglang#26982", akin="vllm#38652")
class ScalesStayWhenTokensMove(ForwardingRunner):
    """If tokens are moved to other blocks, the scales of these blocks are not updated."""

    moved = False

    def load_cache(self, image: CacheImage) -> None:
        """Load the cache, but from the second load on without scales."""
        layout, blocks = image.layout, image.blocks.copy()
        if self.moved:
            there = self.inner.read_cache(image.block_ids)
            layout.scales(blocks)[...] = layout.scales(there)
        self.moved = True
        self.inner.load_cache(replace(image, blocks=blocks))


@runner_fault(FaultClass.STALE, "S-17", "S-21")
class WeightsOfTheFirstLayerServeAll(ForwardingRunner):
    """All layers use the kv_b_proj of the first layer."""

    weights: NDArray[Any] | None = None

    def layer(self, batch: LayerBatch) -> Output:
        """Run the layer with the first weights."""
        if self.weights is None:
            self.weights = batch.kv_b_proj.copy()
        return self.inner.layer(replace(batch, kv_b_proj=self.weights))
