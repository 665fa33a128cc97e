"""Runners that handle illegal rows in a wrong way.

All are right for legal steps. Only runners of ``prepare_unchecked`` get illegal steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, Shows, runner_fault
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.bounded import legal_rows, taken_as
from paged_mla_reference.rules.paging import NO_SLOT
from paged_mla_shared.problem import Batch, Mask, MaskSpelling, Metadata, Output, Problem

SHOWS = ("S-2", "S-1", "S-3", "S-6", "S-9", "S-10")  # detect rows that should be padding


class _TakesAnotherStep(ForwardingRunner):
    """Plans, appends, attention and gathers use the step that :meth:`taken` returns."""

    def taken(self, batch: Batch) -> Batch:
        """Return the changed step."""
        raise NotImplementedError

    def plan(self, batch: Batch) -> Metadata:
        """Plan the changed step."""
        return self.inner.plan(self.taken(batch))

    def append(self, batch: Batch) -> None:
        """Append the changed step."""
        self.inner.append(self.taken(batch))

    def attend(self, batch: Batch) -> Output:
        """Attend with the changed step."""
        return self.inner.attend(self.taken(batch))

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gather with the changed step."""
        return self.inner.gather_context(self.taken(batch))


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class PositionsInFrontOfRowsAreWritten(ForwardingRunner):
    """If a row has fewer keys than queries, tokens are written through the table row before."""

    def append(self, batch: Batch) -> None:
        """Append, and write the tokens that have negative positions."""
        self.inner.append(batch)
        slots = _slots_in_front(self.problem, batch)
        if batch.slot_mapping is None and (slots >= 0).any():
            self.inner.append(replace(batch, slot_mapping=slots))


def _slots_in_front(problem: Problem, batch: Batch) -> NDArray[np.int64]:
    """Return the slots of tokens with negative positions, -1 for other tokens."""
    slots = np.full(batch.num_tokens, NO_SLOT, np.int64)
    width, size = batch.block_table.shape[1], problem.block_size
    if problem.mask is Mask.NON_CAUSAL:
        return slots
    for row, seq_len in enumerate(batch.seq_lens.tolist()):
        start, end = batch.cu_seqlens_q[row : row + 2].tolist()
        if not (0 < seq_len < end - start and 0 <= start < end <= batch.num_tokens):
            continue
        position = seq_len - (end - start) + np.arange(end - start)
        entry = row * width + position // size
        table = batch.block_table.ravel()
        block = table[np.maximum(entry, 0)].astype(np.int64)
        is_wrong = (position < 0) & (entry >= 0) & (block >= 0) & (block < problem.num_blocks)
        slots[start:end] = np.where(is_wrong, block * size + position % size, NO_SLOT)
    return slots


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class ShortRowsAreAsLongAsTheirQueries(_TakesAnotherStep):
    """A row with fewer keys than queries gets as many keys as it has queries."""

    def taken(self, batch: Batch) -> Batch:
        """Lengthen rows with fewer keys than queries."""
        if self.problem.mask is Mask.NON_CAUSAL:
            return batch
        query_lens = np.diff(batch.cu_seqlens_q.astype(np.int64))
        longer = np.maximum(batch.seq_lens, np.minimum(query_lens, self.problem.max_model_len))
        lengths = np.where(batch.seq_lens > 0, longer, batch.seq_lens)
        return replace(batch, seq_lens=lengths.astype(np.int32))


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class LengthsLoseTheirSign(_TakesAnotherStep):
    """The sign of a negative length is ignored."""

    def taken(self, batch: Batch) -> Batch:
        """Return the step with absolute lengths."""
        lengths = np.abs(batch.seq_lens.astype(np.int64)).clip(max=2**31 - 1)
        return replace(batch, seq_lens=lengths.astype(np.int32))


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class LengthsAreClampedToTheTable(_TakesAnotherStep):
    """A row longer than its table or than max_model_len is shortened."""

    def taken(self, batch: Batch) -> Batch:
        """Shorten rows."""
        room = batch.block_table.shape[1] * self.problem.block_size
        most = min(room, self.problem.max_model_len)
        return replace(batch, seq_lens=np.minimum(batch.seq_lens, most).astype(np.int32))


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class ColumnsPastTheTableAreBlockZero(_TakesAnotherStep):
    """Table entries past the last column are read as block 0."""

    def taken(self, batch: Batch) -> Batch:
        """Widen the table for the longest row within max_model_len."""
        within = batch.seq_lens[batch.seq_lens <= self.problem.max_model_len]
        needed = -(-int(within.max(initial=0)) // self.problem.block_size)
        missing = max(needed - batch.block_table.shape[1], 0)
        return replace(batch, block_table=np.pad(batch.block_table, ((0, 0), (0, missing))))


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class StartsBelowZeroAreTokenZero(_TakesAnotherStep):
    """A row that begins before token 0 is treated as beginning at token 0."""

    def taken(self, batch: Batch) -> Batch:
        """Clamp the starts of rows."""
        return replace(batch, cu_seqlens_q=np.maximum(batch.cu_seqlens_q, 0))


@runner_fault(FaultClass.VALIDATION, *SHOWS, "S-5", "S-7", shows=Shows.ILLEGAL_STEPS)
class RowsEndWhereLaterOnesBegin(_TakesAnotherStep):
    """If two rows overlap, the earlier row ends where the later row begins."""

    def taken(self, batch: Batch) -> Batch:
        """Reduce each prefix sum to the smallest later one."""
        sums = np.minimum.accumulate(batch.cu_seqlens_q[::-1])[::-1]
        return replace(batch, cu_seqlens_q=np.ascontiguousarray(sums))


class _ReadsOtherBlocks(_TakesAnotherStep):
    """Block ids outside the cache are replaced by ids inside the cache."""

    def taken(self, batch: Batch) -> Batch:
        """Change the ids outside the cache among the table entries that rows use."""
        table, size = batch.block_table.astype(np.int64), self.problem.block_size
        used = np.arange(table.shape[1]) * size < batch.seq_lens[:, None]
        strange = used & ((table < 0) | (table >= self.problem.num_blocks))
        other = np.where(strange, self.block(table), table)
        return replace(batch, block_table=other.astype(np.int32))

    def block(self, table: NDArray[np.int64]) -> NDArray[np.int64] | int:
        """Return the blocks that replace ids outside the cache."""
        raise NotImplementedError


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class BlocksOutsideTheCacheAreBlockZero(_ReadsOtherBlocks):
    """A block id outside the cache is used as block 0."""

    def block(self, table: NDArray[np.int64]) -> int:  # noqa: ARG002 - not used here
        """Return 0."""
        return 0


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class BlocksPastTheCacheAreItsLast(_ReadsOtherBlocks):
    """A block id outside the cache is clamped to the nearest valid id."""

    def block(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Clamp the ids."""
        return table.clip(0, self.problem.num_blocks - 1)


@runner_fault(FaultClass.VALIDATION, *SHOWS, shows=Shows.ILLEGAL_STEPS)
class NegativeBlocksCountFromTheEnd(_ReadsOtherBlocks):
    """A block id outside the cache wraps around: -1 is the last block of the cache."""

    def block(self, table: NDArray[np.int64]) -> NDArray[np.int64]:
        """Wrap the ids around."""
        return table % self.problem.num_blocks


class _WritesOtherSlots(_TakesAnotherStep):
    """The slots of slot_mapping are changed before they are checked."""

    def taken(self, batch: Batch) -> Batch:
        """Return the step with changed slots."""
        slots = batch.slot_mapping
        return batch if slots is None else replace(batch, slot_mapping=self.slots(slots))

    def slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the changed slots."""
        raise NotImplementedError


@runner_fault(FaultClass.VALIDATION, "S-10", "S-1", shows=Shows.ILLEGAL_STEPS)
class SlotsPastTheCacheAreItsLast(_WritesOtherSlots):
    """A slot of slot_mapping after the end of the cache is clamped to its last slot."""

    def slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Clamp the slots."""
        return np.minimum(slots, self.problem.num_blocks * self.problem.block_size - 1)


@runner_fault(FaultClass.OFFSET, "S-10", "S-1", shows=Shows.ILLEGAL_STEPS)
class NamedSlotsKeepHalfTheirBits(_WritesOtherSlots):
    """Slots of slot_mapping keep only 32 bits, so that a large slot is inside the cache."""

    def slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Keep the lower 32 bits."""
        return slots.astype(np.int32).astype(np.int64)


@runner_fault(FaultClass.VALIDATION, "S-10", "S-1", shows=Shows.ILLEGAL_STEPS)
class SlotsBelowMinusOneAreWritten(_WritesOtherSlots):
    """Slots below -1 count from the end of the cache; only -1 is not written."""

    def slots(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Wrap the slots around."""
        count = self.problem.num_blocks * self.problem.block_size
        return np.where(slots < -1, slots % count, slots)


@runner_fault(FaultClass.VALIDATION, "S-14", *SHOWS, "S-5", "S-7", shows=Shows.ILLEGAL_STEPS)
class MasksAreReadPastTheirEnd(_TakesAnotherStep):
    """If a mask is too short, memory after its end is read as part of it."""

    def taken(self, batch: Batch) -> Batch:
        """Lengthen a flat mask by more elements than legal rows can use."""
        problem = self.problem
        if batch.mask is None or problem.mask_spelling is MaskSpelling.PACKED:
            return batch
        longest = max(problem.max_model_len, problem.max_draft_tokens)
        more = problem.max_rows * problem.max_draft_tokens * longest
        return replace(batch, mask=np.append(batch.mask, np.ones(more, bool)))


@runner_fault(FaultClass.MASK, "S-14", "S-3", "S-4", "S-5", "S-7", "S-6", shows=Shows.ILLEGAL_STEPS)
class OnlyLegalRowsHaveMaskElements(_TakesAnotherStep):
    """The start of a row's mask counts only the masks of legal rows before it."""

    def taken(self, batch: Batch) -> Batch:
        """Insert elements for the masks of illegal rows."""
        problem = self.problem
        if batch.mask is None or problem.mask_spelling is MaskSpelling.PACKED:
            return batch
        mask, begin = batch.mask, 0
        query_lens = np.diff(batch.cu_seqlens_q.astype(np.int64))
        columns = query_lens if problem.mask_spelling is MaskSpelling.QLEN else batch.seq_lens
        for row, legal in enumerate(legal_rows(problem, batch).tolist()):
            count = int(max(query_lens[row], 0)) * int(max(columns[row], 0))
            if begin + count > batch.mask.size:
                break
            if not legal:
                mask = np.insert(mask, begin, np.ones(count, bool))
            begin += count
        return replace(batch, mask=mask)


@runner_fault(FaultClass.VALIDATION, *SHOWS, "S-5", "S-7", shows=Shows.ILLEGAL_STEPS)
class OneIllegalRowSilencesTheStep(_TakesAnotherStep):
    """If one row of a step is illegal, all its rows are treated as padding."""

    def taken(self, batch: Batch) -> Batch:
        """Return the step with lengths of 0."""
        if legal_rows(self.problem, batch).all():
            return batch
        return replace(batch, seq_lens=np.zeros_like(batch.seq_lens))


@runner_fault(FaultClass.VALIDATION, "S-6", shows=Shows.ILLEGAL_STEPS)
class RowsThatAreNotLegalAreLeftUnwritten(ForwardingRunner):
    """The output of an illegal row is not written."""

    def attend(self, batch: Batch) -> Output:
        """Attend, and replace the output of illegal rows by NaN."""
        answer = self.inner.attend(batch)
        taken = taken_as(self.problem, batch).seq_lens
        lost = (batch.seq_lens != 0) & (taken[len(taken) - batch.num_rows :] == 0)
        for row in np.flatnonzero(lost).tolist():
            start, end = np.clip(batch.cu_seqlens_q[row : row + 2], 0, batch.num_tokens)
            answer.out[start:end] = np.nan
        return answer


@runner_fault(
    FaultClass.STALE, "S-17", "S-2", "S-5", "S-6", "S-7", "S-9", shows=Shows.ILLEGAL_STEPS
)
class TheStepBehindAnIllegalOneIsIdle(ForwardingRunner):
    """In the step after an illegal step, all rows are treated as padding."""

    was_illegal = False

    def attend(self, batch: Batch) -> Output:
        """Attend, and return an empty output after an illegal step."""
        answer, is_idle = self.inner.attend(batch), self.was_illegal
        self.was_illegal = not legal_rows(self.problem, batch).all()
        if is_idle:
            answer.out[:], answer.lse[:] = 0, -np.inf
        return answer
