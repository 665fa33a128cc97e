"""Faults of an engine's bookkeeping, which the audit of the simulator finds."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

from paged_mla_reference.faults.fault import FaultClass, Shows, engine_fault
from paged_mla_reference.faults.patches import patched
from paged_mla_reference.simulator.block_pool import BlockPool
from paged_mla_reference.simulator.engine import Engine
from paged_mla_reference.simulator.step import Row


@engine_fault(FaultClass.HASH, "S-13", shows=Shows.AUDIT)
def references_are_not_dropped() -> AbstractContextManager[None]:
    """A request that ends keeps its references to cached blocks."""

    def release(pool: BlockPool, block_ids: Sequence[int]) -> None:
        assert pool.available + len(block_ids) > 0

    return patched((BlockPool, "release", release))


@engine_fault(FaultClass.HASH, "S-13", shows=Shows.AUDIT)
def cleanup_never_runs() -> AbstractContextManager[None]:
    """A request that ends is removed from the running requests, but does not free its blocks."""
    return patched((Engine, "_retire", lambda engine, seq: engine.running.remove(seq)))


@engine_fault(FaultClass.POSITION, "S-3", shows=Shows.AUDIT)
def positions_count_from_the_chunk() -> AbstractContextManager[None]:
    """The positions of a row start at 0 in every step, without its context."""
    return patched((Row, "context_len", 0))
