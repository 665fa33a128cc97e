"""The specification as a backend: it must pass the suite that is built on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_reference.rules.bounded import taken_as
from paged_mla_reference.rules.encoding import ENCODINGS
from paged_mla_reference.rules.paging import NO_SLOT
from paged_mla_reference.rules.validation.inputs import (
    validate_batch,
    validate_layer,
    validate_prefill,
    validate_problem,
    validate_query_scale,
)
from paged_mla_shared import __version__
from paged_mla_shared.backend import Capabilities, Runner
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

CAPABILITIES = Capabilities(
    ops=frozenset(
        {
            "plan",
            "append",
            "attend",
            "merge",
            "gather_context",
            "quantise_queries",
            "prefill",
            "layer",
        }
    ),
    dtypes=frozenset(PLAIN_FORMAT_OF_DTYPE),
    cache_formats=frozenset(ENCODINGS),
    block_sizes=frozenset(range(1, 1057)),
    num_heads=frozenset(range(1, 129)),
    head_dims=frozenset((r, p) for r in (16, 32, 64, 128, 256, 512) for p in (8, 16, 32, 64)),
    masks=frozenset({"causal", "non_causal", "tree:qlen", "tree:full", "tree:packed"}),
    ropes=frozenset({"interleaved", "neox"}),
    features=frozenset(
        {
            "mixed",
            "padding",
            "replay",
            "strided_cache",
            "strided_inputs",
            "large_offsets",
            "explicit_slots",
            "validation",
            "deterministic",
            "bounded",
        }
    ),
    prefill_dims=frozenset(
        (n, p, v)
        for n in (16, 32, 64, 128, 192)
        for p in (8, 16, 32, 64)
        for v in (16, 32, 64, 128, 256)
    ),
    max_query_len=2**20,
)


@dataclass(frozen=True)
class ReferenceBackend:
    """NumPy in float64, rounded where the rules round; another oracle makes it wrong."""

    name: str = "paged-mla-reference"
    version: str = __version__
    mode: str = "cpu"
    device: str = "NumPy"
    memory_bytes: int = 2**62  # the cache is sparse: any size fits
    capabilities: Capabilities = CAPABILITIES
    oracle: Oracle = RIGHT

    def prepare(self, problem: Problem) -> Runner:
        """Build a runner whose cache is all zeros."""
        validate_problem(problem)
        unmet = self.capabilities.unmet(problem, (), ())
        if unmet:
            raise Unsupported("; ".join(unmet))
        return ReferenceRunner(problem, self.oracle)

    def prepare_unchecked(self, problem: Problem) -> Runner:
        """Build a runner that refuses no step."""
        return UncheckedRunner(problem, self.oracle)


class ReferenceRunner:
    """One problem and its cache, as a sparse image. Every call checks its batch first."""

    def __init__(self, problem: Problem, oracle: Oracle = RIGHT) -> None:
        self._problem = problem
        self._oracle = oracle
        self._image = CacheImage.without_blocks(problem.layout, np.zeros(1, np.uint8))

    def load_cache(self, image: CacheImage) -> None:
        """Make the cache equal `image`, poison included."""
        self._image = image

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [n, block_bytes] of those blocks as they are now."""
        return self._image.read(block_ids)

    def plan(self, batch: Batch) -> Metadata:
        """Return positions and slots (S-1, S-3)."""
        validate_batch(self._problem, batch)
        return self._oracle.metadata(self._problem, batch)

    def append(self, batch: Batch) -> None:
        """Write the batch's ``ckv`` and ``k_pe`` to the cache (S-10)."""
        validate_batch(self._problem, batch)
        self._image = self._oracle.append(self._problem, batch, self._image)

    def attend(self, batch: Batch) -> Output:
        """Attend every query to what the cache holds now (S-4 to S-7)."""
        validate_batch(self._problem, batch)
        return self._oracle.attend(self._problem, batch, self._image)

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partials of one query set (S-8)."""
        return self._oracle.merge(partials)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached ``ckv`` [K, R] and ``k_pe`` [K, P]."""
        validate_batch(self._problem, batch)
        return self._oracle.gather_context(self._problem, batch, self._image)

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the queries as e4m3 codes with scales (S-11)."""
        validate_batch(self._problem, batch)
        validate_query_scale(scale)
        return self._oracle.quantise_queries(self._problem, batch, scale)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to keys and values of every head (S-21)."""
        validate_prefill(self._problem, batch)
        return self._oracle.prefill(self._problem, batch)

    def layer(self, batch: LayerBatch) -> Output:
        """Append a step's latents and attend to the cache, between a layer's projections (S-21)."""
        validate_layer(self._problem, batch)
        self._image = self._oracle.append(self._problem, batch.step, self._image)
        return self._oracle.layer(self._problem, batch, self._image)


class UncheckedRunner(ReferenceRunner):
    """A runner that looks at no values: a step that no rule allows is taken for a legal one.

    Only what such steps are put to differs from a runner that checks.
    """

    def plan(self, batch: Batch) -> Metadata:
        """Return positions and slots (S-1, S-3)."""
        taken = taken_as(self._problem, replace(batch, slot_mapping=None))
        assert taken.slot_mapping is not None
        planned = self._oracle.metadata(self._problem, taken)
        has_slot = taken.slot_mapping >= 0
        return Metadata(planned.positions, np.where(has_slot, planned.slot_mapping, NO_SLOT))

    def append(self, batch: Batch) -> None:
        """Write the batch's ``ckv`` and ``k_pe`` to the cache (S-10)."""
        taken = taken_as(self._problem, batch)
        self._image = self._oracle.append(self._problem, taken, self._image)

    def attend(self, batch: Batch) -> Output:
        """Attend every query to what the cache holds now (S-4 to S-7)."""
        taken = taken_as(self._problem, batch)
        return self._oracle.attend(self._problem, taken, self._image)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the cached ``ckv`` [K, R] and ``k_pe`` [K, P] of every legal row."""
        taken = taken_as(self._problem, batch)
        return self._oracle.gather_context(self._problem, taken, self._image)


def create() -> ReferenceBackend:
    """Return the reference as a backend."""
    return ReferenceBackend()
