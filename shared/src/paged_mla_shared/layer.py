"""A step of one attention layer between its projections: what a whole layer is asked (S-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.problem import Batch


@dataclass(frozen=True)
class LayerBatch:
    """A step, the weights of its heads, and how the work may be done.

    Parameters
    ----------
    step : Batch
        Its ``q_nope`` is [T, H, N], not absorbed.
    kv_b_proj : dtype [H * (N + V), R]
        Latents to keys without position and to values, head by head.
    absorbed_rows : int
        So many leading rows are attended to absorbed, the others over materialized keys: all of
        them where the mask is not causal. What the answer is does not depend on it.
    workspace : int
        Keys that are materialized at a time, at least ``max_query_tokens``; nor on this.
    """

    step: Batch
    kv_b_proj: NDArray[Any]
    absorbed_rows: int
    workspace: int

    @property
    def num_tokens(self) -> int:
        """T, padded tokens included."""
        return self.step.num_tokens

    @property
    def query_width(self) -> int:
        """N + P."""
        return self.step.query_width

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """Every array, by name."""
        fields = vars(self.step) | {"kv_b_proj": self.kv_b_proj}
        return {name: array for name, array in fields.items() if isinstance(array, np.ndarray)}
