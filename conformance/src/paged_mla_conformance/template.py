"""A backend in 70 lines of NumPy from which to start. It passes the suite as it is.

Copy this file and replace one method after the other by a call of your kernel, ``attend`` first.
The page ``conformance/docs/your-backend.md`` describes what to declare, and the arguments and the
results of every call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules import merge, paging, positions
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


class Runner:
    """A runner of one problem, with its cache."""

    merge = staticmethod(merge.merge)

    def __init__(self, problem: Problem) -> None:
        self.problem = problem

    def load_cache(self, image: CacheImage) -> None:
        """Copy the blocks of `image`, uint8 [num_blocks, block_bytes], to the cache."""
        blocks = image.read(np.arange(self.problem.num_blocks))
        self.cache = blocks.view(np.float32).reshape(-1, self.problem.dims.cached_dim)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes of these blocks, uint8 [n, block_bytes]."""
        return self.cache.view(np.uint8).reshape(self.problem.num_blocks, -1)[block_ids]

    def plan(self, batch: Batch) -> Metadata:
        """Return the position and the slot of every query token."""
        return positions.metadata(self.problem, batch)

    def append(self, batch: Batch) -> None:
        """Write the keys of the new tokens to their slots; the slot of a padded token is -1."""
        slots = self.plan(batch).slot_mapping  # [T]
        self.cache[slots[slots >= 0]] = np.hstack([batch.ckv, batch.k_pe])[slots >= 0]

    def attend(self, batch: Batch) -> Output:
        """Return the outputs [T, H, R] and lse [T, H] of causal attention."""
        q = np.dstack([batch.q_nope, batch.q_pe])  # [T, H, R + P]
        out, lse = np.zeros_like(batch.q_nope), np.full(q.shape[:2], -np.inf, np.float32)
        for b, count in enumerate(batch.seq_lens):
            slots = paging.slots_of(batch.block_table[b], np.arange(count), self.problem.block_size)
            start, stop = batch.cu_seqlens_q[b : b + 2]
            for token in range(start, stop):
                keys = self.cache[slots[: count + 1 + token - stop]].astype(np.float64)
                scores = self.problem.softmax_scale * q[token] @ keys.T  # [H, S]
                lse[token] = total = np.logaddexp.reduce(scores, axis=1)
                out[token] = np.exp(scores - total[:, None]) @ keys[:, : batch.ckv.shape[1]]
        return Output(out, lse)


class Backend:
    """Declares the capabilities of the runner and where it runs, and prepares runners."""

    name = "numpy-template"
    version = "0.1"
    mode = "cpu"
    device = "NumPy"
    memory_bytes = 2**30
    capabilities = Capabilities(
        ops=frozenset({"plan", "append", "attend", "merge"}),
        masks=frozenset({"causal"}),
        dtypes=frozenset({"float32"}),
        cache_formats=frozenset({"fp32"}),
        block_sizes=frozenset({16, 64}),
        num_heads=frozenset({1, 4, 16}),
        head_dims=frozenset({(32, 16)}),
        features=frozenset({"mixed", "padding", "replay"}),
        max_query_len=1024,
    )

    def prepare(self, problem: Problem) -> Any:
        """Return a runner for a problem that the declared capabilities cover."""
        return Runner(problem)


create = Backend
