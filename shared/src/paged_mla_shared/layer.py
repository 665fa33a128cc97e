"""The input of a whole attention layer between its projections, for one step (S-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.problem import Batch


@dataclass(frozen=True)
class LayerBatch:
    """A step, the weights of its heads, and parameters that divide the work.

    Parameters
    ----------
    step : Batch
        The step; its ``q_nope`` is [T, H, N], not absorbed.
    kv_b_proj : dtype [H * (N + V), R]
        The weights from latents to keys without position and to values, head by head.
    absorbed_rows : int
        The number of leading rows with absorbed attention; other rows use materialized keys. If
        the mask is not causal, all rows are absorbed. The output does not depend on this number.
    workspace : int
        The number of keys that are materialized at a time, at least ``max_query_tokens``. The
        output does not depend on it.
    """

    step: Batch
    kv_b_proj: NDArray[Any]
    absorbed_rows: int
    workspace: int

    @property
    def num_tokens(self) -> int:
        """The number of query tokens, T, including padded tokens."""
        return self.step.num_tokens

    @property
    def query_width(self) -> int:
        """The number of elements of a query, N + P."""
        return self.step.query_width

    @property
    def arrays(self) -> dict[str, NDArray[Any]]:
        """All arrays by name, including those of the step."""
        fields = vars(self.step) | {"kv_b_proj": self.kv_b_proj}
        return {name: array for name, array in fields.items() if isinstance(array, np.ndarray)}
