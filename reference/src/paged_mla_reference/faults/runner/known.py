"""Runners that take a step for one they know, by what does not tell steps apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.faults.fault import FaultClass, runner_fault
from paged_mla_reference.faults.runner.stale import SHOWS, blocks_of_rows, with_blocks
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.backend import Runner
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Metadata, Output, Problem


@runner_fault(FaultClass.HOST_SCALAR, *SHOWS, "S-14")
class TreesAreKnownByTheirLengths(ForwardingRunner):
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


@runner_fault(FaultClass.HOST_SCALAR, "S-17", "S-1", "S-3", "S-10")
class PlansAreKnownByTheirLengths(ForwardingRunner):
    """Positions and slots are those of the first step that had the same lengths."""

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        self.plans: dict[tuple[int, bytes, bytes], Metadata] = {}

    def plan(self, batch: Batch) -> Metadata:
        """Return the plan that is kept for the lengths."""
        lengths = batch.num_tokens, batch.cu_seqlens_q.tobytes(), batch.seq_lens.tobytes()
        kept = self.plans.setdefault(lengths, self.inner.plan(batch))
        return Metadata(kept.positions.copy(), kept.slot_mapping.copy())

    def append(self, batch: Batch) -> None:
        """Write where the kept plan says, unless the step names slots."""
        if batch.slot_mapping is None:
            batch = replace(batch, slot_mapping=self.plan(batch).slot_mapping)
        self.inner.append(batch)


@runner_fault(FaultClass.STALE, *SHOWS)
class TablesAreKnownByTheirBlockCounts(ForwardingRunner):
    """A step whose rows have as many blocks as those of the step before keeps its table."""

    blocks: Sequence[NDArray[np.int64]] = ()

    def attend(self, batch: Batch) -> Output:
        """Read the blocks of the last step that had other numbers of them."""
        blocks = blocks_of_rows(batch, self.problem.block_size)
        if list(map(len, blocks)) != list(map(len, self.blocks)):
            self.blocks = blocks
        return self.inner.attend(with_blocks(batch, self.blocks))


@runner_fault(FaultClass.STALE, "S-17", "S-4", "S-5", "S-10")
class AnAppendToTheSameSlotsIsSkipped(ForwardingRunner):
    """A step that has the slots of the one before is not appended."""

    before: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Append to other slots alone."""
        slots = batch.slot_mapping
        if slots is None:
            slots = self.inner.plan(batch).slot_mapping
        if self.before is None or not np.array_equal(slots, self.before):
            self.inner.append(batch)
        self.before = slots.copy()


@runner_fault(FaultClass.STALE, "S-17", "S-10", "S-5")
class AnImageOfTheSameBlocksIsNotTaken(ForwardingRunner):
    """A cache that lists the blocks of the one before is not loaded."""

    before: NDArray[np.int64] | None = None

    def load_cache(self, image: CacheImage) -> None:
        """Load a cache of other blocks alone."""
        if self.before is None or not np.array_equal(image.block_ids, self.before):
            self.inner.load_cache(image)
        self.before = image.block_ids.copy()
