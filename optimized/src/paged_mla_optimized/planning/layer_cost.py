"""Which rows of a step are absorbed and which materialized: a cost model on the host.

Times of a row of q queries that see k keys, the row's context included, with H heads (S-21):

- *absorbed*: every pair of query and key costs ``2 H (2 R + P)`` operations, its attention at least
  the time to read ``k`` cached tokens; and every query ``2 H R (N + V)`` for both projections.
- *materialized*: every pair costs ``2 H (N + P + V)``, with queries in tiles; every key
  ``2 H R (N + V)`` for its projection, ``H (N + V)`` elements written and read, and before that its
  cached bytes read and ``R + P`` elements written.

Long contexts of DeepSeek's heads so cross where 768 q = 131072: at about 170 queries, whatever the
heads, were all operations as fast. They are not where a step has few materialized tiles: one tile
goes through all keys of its row, so that a row of few queries and heads leaves most of the device
idle, and takes as long as one tile. :data:`RATES` has how fast each kind is, and what a group of
rows takes however short it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paged_mla_optimized.config.layer import LayerConfig

_QUERY_TILE = 128  # of materialized attention


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device is at what the two forms are made of.

    Parameters
    ----------
    absorbed, materialized, projection : float
        Operations a second of both attentions and of the products with weights.
    tile : float
        Operations a second of one materialized tile.
    memory : float
        Bytes a second.
    absorbed_start, materialized_start : float
        Seconds that a group of rows takes beside its operations.
    several_start : float
        Seconds more where an absorbed row has several queries.
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
"""Of an H200, from ``bench/reports/layer.json``; other devices have other ones, but much the same
proportions."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """What rows of one config are charged, seconds at :data:`RATES`.

    Parameters
    ----------
    absorbed_pair, absorbed_key, absorbed_query : float
        A pair of query and key, a key that is read, and the products of a query with weights.
    made_key : float
        A key gathered and projected.
    attended_pair, attended_key, tile_key : float
        A pair of materialized heads, a key of theirs that is read, and a key of one tile.
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
        """Return those of a config."""
        mla = config.attention
        token_bytes, latent = mla.stored.token_bytes(mla), mla.kv_lora_rank + mla.qk_rope_head_dim
        absorbed_pair = 2 * mla.num_heads * (latent + mla.kv_lora_rank)
        materialized_pair = 2 * sum(config.prefill.head_dims)  # of one head
        products = 2 * config.projected * mla.kv_lora_rank / RATES.projection
        moved = config.projected * mla.dtype.itemsize / RATES.memory  # written, or read
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
    """What each row of a step takes in both forms.

    Parameters
    ----------
    prices : Prices
    query_lens, key_lens : [B], int64
        Keys that the last query of a row sees, its context and itself included.

    Attributes
    ----------
    absorbed : float64 [B]
        Seconds absorbed.
    keys_made : float64 [B]
        Seconds to gather and project the keys and values of materialized rows.
    attended : float64 [B]
        Seconds of materialized attention, were the device full.
    """

    def __init__(
        self, prices: Prices, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
    ) -> None:
        self._prices = prices
        queries: NDArray[np.float64] = query_lens.astype(np.float64)
        # Of rows without queries nothing is read.
        keys: NDArray[np.float64] = np.multiply(key_lens, query_lens > 0, dtype=np.float64)
        self._queries, self._keys = queries, keys
        # Queries see this many keys on average: of a row's own keys those that are causal.
        seen = np.maximum(keys - 0.5 * queries + 0.5, 0.0)
        padded = (query_lens + (_QUERY_TILE - 1)) & -_QUERY_TILE
        # Sums run over leading rows absorbed and over last rows materialized, from none on.
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
        """Seconds of one materialized tile, [B]; a step takes the longest at least."""
        return self._prices.tile_key * self._keys

    def absorbed_rows(self) -> int:
        """Return how many leading rows are absorbed, so that the whole step takes least time."""
        absorbed, made, attended = np.add.accumulate(self._rows, axis=1)
        longest = np.zeros((2, len(absorbed)))
        longest[0, 1:], longest[1, :0:-1] = self._queries, self._keys
        longest_query, longest_row = np.maximum.accumulate(longest, axis=1)
        absorbed += _absorbed_start(absorbed, longest_query)
        materialized = made + np.maximum(attended, self._prices.tile_key * longest_row)
        materialized += (materialized > 0) * RATES.materialized_start
        total = absorbed[::-1] + materialized  # by materialized rows
        return len(self._keys) - int(total.argmin())  # those without queries cost nothing

    def slowdown(self, absorbed: int) -> float:
        """Return how many times as long the step takes as one with each row in its better form.

        So many leading rows are `absorbed`. It is above 1 where rows with few queries stand behind
        rows with many, and 1 for rows that see no keys.
        """
        alone = self.keys_made + np.maximum(self.attended, self.tile)
        is_leading = np.arange(len(alone)) < absorbed
        least = self._step_seconds(self.absorbed <= alone)
        return self._step_seconds(is_leading) / least if least > 0 else 1.0

    def _step_seconds(self, is_absorbed: NDArray[np.bool_]) -> float:
        """Return the time of both groups."""
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
    """Return what groups of rows take however short they are; empty ones take nothing."""
    start = RATES.absorbed_start + (longest_query > 1) * RATES.several_start
    return (seconds > 0) * start
