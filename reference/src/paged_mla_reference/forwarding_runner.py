"""A runner that forwards every call to another one; subclasses change some calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.backend import Runner
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


class ForwardingRunner:
    """Wraps a right runner.

    Parameters
    ----------
    problem : Problem
    inner : Runner
    """

    def __init__(self, problem: Problem, inner: Runner) -> None:
        self.problem, self.inner = problem, inner

    def load_cache(self, image: CacheImage) -> None:
        """Hand on."""
        self.inner.load_cache(image)

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Hand on."""
        return self.inner.read_cache(block_ids)

    def plan(self, batch: Batch) -> Metadata:
        """Hand on."""
        return self.inner.plan(batch)

    def append(self, batch: Batch) -> None:
        """Hand on."""
        self.inner.append(batch)

    def attend(self, batch: Batch) -> Output:
        """Hand on."""
        return self.inner.attend(batch)

    def merge(self, partials: Sequence[Output]) -> Output:
        """Hand on."""
        return self.inner.merge(partials)

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Hand on."""
        return self.inner.gather_context(batch)

    def quantise_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Hand on."""
        return self.inner.quantise_queries(batch, scale)

    def prefill(self, batch: PrefillBatch) -> Output:
        """Hand on."""
        return self.inner.prefill(batch)

    def layer(self, batch: LayerBatch) -> Output:
        """Hand on."""
        return self.inner.layer(batch)
