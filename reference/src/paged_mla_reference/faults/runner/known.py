"""Runners that reuse data of an earlier step because they compare too little of the steps."""

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
    """A mask is reused while the lengths of the rows stay the same."""

    known: tuple[bytes, bytes] | None = None
    mask: NDArray[Any] | None = None

    def attend(self, batch: Batch) -> Output:
        """Use the mask of the first step since the lengths changed."""
        if self.problem.mask is not Mask.TREE or batch.mask is None:
            return self.inner.attend(batch)
        lengths = batch.seq_lens.tobytes(), batch.cu_seqlens_q.tobytes()
        if self.known != lengths:
            self.known, self.mask = lengths, batch.mask
        return self.inner.attend(replace(batch, mask=self.mask))


@runner_fault(FaultClass.HOST_SCALAR, "S-17", "S-1", "S-3", "S-10")
class PlansAreKnownByTheirLengths(ForwardingRunner):
    """Positions and slots are reused from the first step with the same lengths."""

    def __init__(self, problem: Problem, inner: Runner) -> None:
        super().__init__(problem, inner)
        self.plans: dict[tuple[int, bytes, bytes], Metadata] = {}

    def plan(self, batch: Batch) -> Metadata:
        """Return the plan of the first step with these lengths."""
        lengths = batch.num_tokens, batch.cu_seqlens_q.tobytes(), batch.seq_lens.tobytes()
        kept = self.plans.setdefault(lengths, self.inner.plan(batch))
        return Metadata(kept.positions.copy(), kept.slot_mapping.copy())

    def append(self, batch: Batch) -> None:
        """Write to the slots of the reused plan, unless the step has a slot_mapping."""
        if batch.slot_mapping is None:
            batch = replace(batch, slot_mapping=self.plan(batch).slot_mapping)
        self.inner.append(batch)


@runner_fault(FaultClass.STALE, *SHOWS)
class TablesAreKnownByTheirBlockCounts(ForwardingRunner):
    """The block table is reused while the numbers of blocks of the rows stay the same."""

    blocks: Sequence[NDArray[np.int64]] = ()

    def attend(self, batch: Batch) -> Output:
        """Use the blocks of the first step since the numbers of blocks changed."""
        blocks = blocks_of_rows(batch, self.problem.block_size)
        if list(map(len, blocks)) != list(map(len, self.blocks)):
            self.blocks = blocks
        return self.inner.attend(with_blocks(batch, self.blocks))


@runner_fault(FaultClass.STALE, "S-17", "S-4", "S-5", "S-10")
class AnAppendToTheSameSlotsIsSkipped(ForwardingRunner):
    """A step that writes the same slots as the step before is not appended."""

    before: NDArray[np.int64] | None = None

    def append(self, batch: Batch) -> None:
        """Append only if the slots differ from those of the step before."""
        slots = batch.slot_mapping
        if slots is None:
            slots = self.inner.plan(batch).slot_mapping
        if self.before is None or not np.array_equal(slots, self.before):
            self.inner.append(batch)
        self.before = slots.copy()


@runner_fault(FaultClass.STALE, "S-17", "S-10", "S-5")
class AnImageOfTheSameBlocksIsNotTaken(ForwardingRunner):
    """A cache with the same block ids as the cache loaded before is not loaded."""

    before: NDArray[np.int64] | None = None

    def load_cache(self, image: CacheImage) -> None:
        """Load only if the block ids differ."""
        if self.before is None or not np.array_equal(image.block_ids, self.before):
            self.inner.load_cache(image)
        self.before = image.block_ids.copy()
