"""A cost model on the host that decides which rows of a step are absorbed or materialized.

The costs of a row of q queries and k keys (its context and its own tokens), with H heads (S-21):

- *absorbed*: every pair of query and key costs ``2 H (2 R + P)`` operations. The attention takes at
  least the time to read ``k`` cached tokens. Every query costs ``2 H R (N + V)`` operations for
  both projections.
- *materialized*: every pair costs ``2 H (N + P + V)`` operations, with queries rounded up to tiles.
  Every key costs ``2 H R (N + V)`` operations for its projection, and ``H (N + V)`` elements that
  are written and read. Before that, its cached bytes are read and ``R + P`` elements are written.

If all operations had the same speed, the costs of long contexts with DeepSeek's heads would be
equal at 768 q = 131072, which is about 170 queries for any number of heads. The speeds differ if a
step has few materialized tiles. One tile visits all keys of its row. Therefore a row of few queries
and heads leaves most of the device idle, and takes as long as one tile. :data:`RATES` has the speed
of each kind of operation, and the fixed time of each group of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paged_mla_optimized.config.layer import LayerConfig

_QUERY_TILE = 128  # query tile of materialized attention


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The speeds of a device at the operations of both forms.

    Parameters
    ----------
    absorbed, materialized, projection : float
        Operations per second of absorbed attention, materialized attention and the products with
        weights.
    tile : float
        Operations per second of one materialized query tile.
    memory : float
        Bytes per second.
    absorbed_start, materialized_start : float
        Fixed seconds of each group of rows.
    several_start : float
        Additional fixed seconds if an absorbed row has several queries.
    """

    absorbed: float
    materialized: float
    projection: float
    tile: float
    memory: float
    absorbed_start: float
    materialized_start: float
    several_start: float


RATES = Rates(
    absorbed=740e12,
    materialized=690e12,
    projection=570e12,
    tile=7.8e12,
    memory=3.5e12,
    absorbed_start=14e-6,
    materialized_start=11e-6,
    several_start=8e-6,
)
"""Rates of an H200, from ``bench/reports/layer.json``. Other devices have other rates, but with
similar ratios."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """The costs of rows of one config, in seconds at :data:`RATES`.

    Parameters
    ----------
    absorbed_pair, absorbed_key, absorbed_query : float
        A pair of query and key, a key that is read, and the projections of a query.
    made_key : float
        A key that is gathered and projected.
    attended_pair, attended_key, tile_key : float
        A pair of query and key in materialized attention, a materialized key that is read, and a
        key of one query tile.
    """

    absorbed_pair: float
    absorbed_key: float
    absorbed_query: float
    made_key: float
    attended_pair: float
    attended_key: float
    tile_key: float

    @classmethod
    def of(cls, config: LayerConfig) -> Prices:
        """Return the costs for a config."""
        mla = config.attention
        token_bytes, latent = mla.stored.token_bytes(mla), mla.kv_lora_rank + mla.qk_rope_head_dim
        absorbed_pair = 2 * mla.num_heads * (latent + mla.kv_lora_rank)
        materialized_pair = 2 * sum(config.prefill.head_dims)  # operations of one head
        products = 2 * config.projected * mla.kv_lora_rank / RATES.projection
        moved = config.projected * mla.dtype.itemsize / RATES.memory  # to write, or to read
        gathered = (token_bytes + latent * mla.dtype.itemsize) / RATES.memory
        return cls(
            absorbed_pair=absorbed_pair / RATES.absorbed,
            absorbed_key=token_bytes / RATES.memory,
            absorbed_query=products,
            made_key=gathered + max(products, moved),
            attended_pair=mla.num_heads * materialized_pair / RATES.materialized,
            attended_key=moved,
            tile_key=materialized_pair * _QUERY_TILE / RATES.tile,
        )


class Forms:
    """The time of each row of a step in both forms.

    Parameters
    ----------
    prices : Prices
    query_lens, key_lens : [B], int64
        Query lengths, and the keys that the last query of each row sees, itself included.

    Attributes
    ----------
    absorbed : float64 [B]
        Seconds of the row if it is absorbed.
    keys_made : float64 [B]
        Seconds to gather and project the keys and values of materialized rows.
    attended : float64 [B]
        Seconds of materialized attention if it uses the full device.
    """

    def __init__(
        self, prices: Prices, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
    ) -> None:
        self._prices = prices
        queries: NDArray[np.float64] = query_lens.astype(np.float64)
        # Rows without queries read nothing.
        keys: NDArray[np.float64] = np.multiply(key_lens, query_lens > 0, dtype=np.float64)
        self._queries, self._keys = queries, keys
        # Average number of keys that a query sees; the row's own tokens are causal.
        seen = np.maximum(keys - 0.5 * queries + 0.5, 0.0)
        padded = (query_lens + (_QUERY_TILE - 1)) & -_QUERY_TILE
        # Sums over leading absorbed rows and over trailing materialized rows; both start at 0 rows.
        self._rows = rows = np.zeros((3, len(queries) + 1))
        self.absorbed, self.keys_made, self.attended = rows[0, 1:], rows[1, :0:-1], rows[2, :0:-1]
        attention = prices.absorbed_pair * (queries * seen)
        np.maximum(attention, prices.absorbed_key * keys, out=self.absorbed)
        self.absorbed += prices.absorbed_query * queries
        np.multiply(keys, prices.made_key, out=self.keys_made)
        tiled = prices.attended_pair * (padded * seen)
        np.maximum(tiled, prices.attended_key * keys, out=self.attended)

    @cached_property
    def tile(self) -> NDArray[np.float64]:
        """Seconds of one materialized query tile, [B]; a step takes at least the largest."""
        return self._prices.tile_key * self._keys

    def absorbed_rows(self) -> int:
        """Return the number of leading absorbed rows for which the whole step is fastest."""
        absorbed, made, attended = np.add.accumulate(self._rows, axis=1)
        longest = np.zeros((2, len(absorbed)))
        longest[0, 1:], longest[1, :0:-1] = self._queries, self._keys
        longest_query, longest_row = np.maximum.accumulate(longest, axis=1)
        absorbed += _absorbed_start(absorbed, longest_query)
        materialized = made + np.maximum(attended, self._prices.tile_key * longest_row)
        materialized += (materialized > 0) * RATES.materialized_start
        total = absorbed[::-1] + materialized  # indexed by the number of materialized rows
        return len(self._keys) - int(total.argmin())  # rows without queries cost nothing

    def slowdown(self, absorbed: int) -> float:
        """Return the time of the step divided by its time with each row in its better form.

        `absorbed` is the number of leading absorbed rows. The result is above 1 if rows with few
        queries follow rows with many, and 1 if no row sees a key.
        """
        alone = self.keys_made + np.maximum(self.attended, self.tile)
        is_leading = np.arange(len(alone)) < absorbed
        least = self._step_seconds(self.absorbed <= alone)
        return self._step_seconds(is_leading) / least if least > 0 else 1.0

    def _step_seconds(self, is_absorbed: NDArray[np.bool_]) -> float:
        """Return the time of the absorbed and the materialized rows together."""
        absorbed = self.absorbed[is_absorbed].sum()
        absorbed += _absorbed_start(absorbed, self._queries[is_absorbed].max(initial=0.0))
        rest = ~is_absorbed
        materialized = self.keys_made[rest].sum()
        materialized += max(self.attended[rest].sum(), self.tile[rest].max(initial=0.0))
        materialized += RATES.materialized_start if materialized > 0 else 0.0
        return float(absorbed + materialized)


def _absorbed_start(
    seconds: NDArray[np.float64], longest_query: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the fixed time of groups of rows; it is 0 for groups without work."""
    start = RATES.absorbed_start + (longest_query > 1) * RATES.several_start
    return (seconds > 0) * start
