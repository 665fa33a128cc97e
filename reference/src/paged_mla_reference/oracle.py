"""The rules as replaceable functions, and the runners that call them.

A fault replaces one of these functions by a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.attention import AttendQuery, attend, attend_visible
from paged_mla_reference.rules.bounded import taken_as
from paged_mla_reference.rules.cache import append, gather_context
from paged_mla_reference.rules.layer import layer
from paged_mla_reference.rules.merge import merge
from paged_mla_reference.rules.paging import NO_SLOT
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.queries import quantize_queries
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import (
    validate_batch,
    validate_layer,
    validate_prefill,
    validate_query_scale,
)
from paged_mla_shared.backend import Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


def answer(problem: Problem, batch: Batch, image: CacheImage) -> Output:
    """Return the output of a step as a backend returns it, rounded where the rules round."""
    return attend(problem, batch, image, Rounding.SPEC).output(problem.dtype)


def visible_answer(
    problem: Problem,
    batch: Batch,
    image: CacheImage,
    visible: Sequence[NDArray[np.bool_]],
    attend_query: AttendQuery | None = None,
) -> Output:
    """Return the output of :func:`answer` for the keys in `visible`.

    `visible` has one matrix bool [query_len, seq_len] per row.
    `attend_query` replaces :func:`paged_mla_reference.rules.attention.attend_one` if it is passed.
    """
    found = attend_visible(problem, batch, image, visible, attend_query=attend_query)
    return found.output(problem.dtype)


def prefilled(problem: Problem, batch: PrefillBatch) -> Output:
    """Return the output of a prefill as a backend returns it, rounded where the rules round."""
    return prefill(problem, batch, Rounding.SPEC).output(problem.dtype)


@dataclass(frozen=True, kw_only=True)
class Oracle:
    """The functions that a runner computes with; the runner itself holds the cache.

    Parameters
    ----------
    metadata : callable
        (S-1, S-3), :func:`paged_mla_reference.rules.positions.metadata`.
    append : callable
        (S-10, S-12), :func:`paged_mla_reference.rules.cache.append`.
    attend : callable
        (S-4 to S-7), :func:`answer`.
    attend_visible : callable
        (S-5 to S-7), :func:`visible_answer`.
    gather_context : callable
        (S-1, S-9), :func:`paged_mla_reference.rules.cache.gather_context`.
    quantize_queries : callable
        (S-11), :func:`paged_mla_reference.rules.queries.quantize_queries`.
    merge : callable
        (S-8), :func:`paged_mla_reference.rules.merge.merge`.
    prefill : callable
        (S-21), :func:`prefilled`.
    layer : callable
        (S-21), :func:`paged_mla_reference.rules.layer.layer`.
    """

    metadata: Callable[[Problem, Batch], Metadata] = metadata
    append: Callable[[Problem, Batch, CacheImage], CacheImage] = append
    attend: Callable[[Problem, Batch, CacheImage], Output] = answer
    attend_visible: Callable[..., Output] = visible_answer
    gather_context: Callable[[Problem, Batch, CacheImage], tuple[NDArray[Any], NDArray[Any]]] = (
        gather_context
    )
    quantize_queries: Callable[
        [Problem, Batch, float | None], tuple[NDArray[np.uint8], NDArray[np.float32]]
    ] = quantize_queries
    merge: Callable[[Sequence[Output]], Output] = merge
    prefill: Callable[[Problem, PrefillBatch], Output] = prefilled
    layer: Callable[[Problem, LayerBatch, CacheImage], Output] = layer


RIGHT = Oracle()


class ReferenceRunner(Runner):
    """Runner of one problem; it holds the cache as a sparse image.

    Every call checks its batch first and raises ``InvalidArgument`` if the rules forbid it.
    """

    def __init__(self, problem: Problem, oracle: Oracle = RIGHT) -> None:
        self._problem = problem
        self._oracle = oracle
        self._image = CacheImage.without_blocks(problem.layout, np.zeros(1, np.uint8))

    def load_cache(self, image: CacheImage) -> None:
        """Replace the cache by `image`, including its poison."""
        self._image = image

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the current raw bytes of the blocks `block_ids`, uint8 [n, block_bytes]."""
        return self._image.read(block_ids)

    def plan(self, batch: Batch) -> Metadata:
        """Return positions and slots (S-1, S-3)."""
        return self._oracle.metadata(self._problem, self._taken(batch))

    def append(self, batch: Batch) -> None:
        """Write the batch's ``ckv`` and ``k_pe`` to the cache (S-10)."""
        self._image = self._oracle.append(self._problem, self._taken(batch), self._image)

    def attend(self, batch: Batch) -> Output:
        """Attend every query to the current cache (S-4 to S-7)."""
        return self._oracle.attend(self._problem, self._taken(batch), self._image)

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge float32 partial results of the same queries (S-8)."""
        return self._oracle.merge(partials)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return every row's cached ``ckv`` [K, R] and ``k_pe`` [K, P] in the problem's dtype.

        K is the sum of ``seq_lens``.
        """
        return self._oracle.gather_context(self._problem, self._taken(batch), self._image)

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Return the queries as e4m3 codes with scales (S-11).

        With `scale` ``None``, each token and head has its own scale, computed from its data.
        """
        validate_batch(self._problem, batch)
        validate_query_scale(scale)
        return self._oracle.quantize_queries(self._problem, batch, scale)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Attend to the keys and values of every head (S-21)."""
        validate_prefill(self._problem, batch)
        return self._oracle.prefill(self._problem, batch)

    def layer(self, batch: LayerBatch) -> Output:
        """Append a step's latents and attend to the cache, between a layer's projections (S-21)."""
        validate_layer(self._problem, batch)
        self._image = self._oracle.append(self._problem, batch.step, self._image)
        return self._oracle.layer(self._problem, batch, self._image)

    def _taken(self, batch: Batch) -> Batch:
        """Return `batch` after checking that the rules allow it."""
        validate_batch(self._problem, batch)
        return batch


class UncheckedRunner(ReferenceRunner):
    """Runner that does not check values: it treats an illegal step as a legal one.

    :func:`paged_mla_reference.rules.bounded.taken_as` returns that legal step. Only the
    operations that illegal steps are tested with differ from the runner that checks.
    """

    def plan(self, batch: Batch) -> Metadata:
        """Return positions and slots (S-1, S-3); slot -1 where a block is outside the cache."""
        taken = self._taken(replace(batch, slot_mapping=None))
        assert taken.slot_mapping is not None
        planned = self._oracle.metadata(self._problem, taken)
        has_slot = taken.slot_mapping >= 0
        return Metadata(planned.positions, np.where(has_slot, planned.slot_mapping, NO_SLOT))

    def _taken(self, batch: Batch) -> Batch:
        """Return the legal step that the runner treats `batch` as."""
        return taken_as(self._problem, batch)
