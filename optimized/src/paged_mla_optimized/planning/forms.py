"""Which rows of a step are absorbed and which materialised: a cost model on the host.

Times of a row of q queries that see k keys, the row's context included, with H heads (S-21):

- *absorbed*: every pair of query and key costs ``2 H (2 R + P)`` operations, its attention at least
  the time to read ``k`` cached tokens; and every query ``2 H R (N + V)`` for both projections.
- *materialised*: every pair costs ``2 H (N + P + V)``, with queries in tiles; every key
  ``2 H R (N + V)`` for its projection, ``H (N + V)`` elements written and read, and before that its
  cached bytes read and ``R + P`` elements written.

Long contexts of DeepSeek's heads so cross where 768 q = 131072: at about 170 queries, whatever the
heads, were all operations as fast. They are not where a step has few materialised tiles: one tile
goes through all keys of its row, so that a row of few queries and heads leaves most of the device
idle, and takes as long as one tile. :data:`RATES` has how fast each kind is, and what a group of
rows takes however short it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from paged_mla_optimized.layer_config import LayerConfig

_QUERY_TILE = 128  # of materialised attention


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a device is at what the two forms are made of.

    Parameters
    ----------
    absorbed, materialised, projection : float
        Operations a second of both attentions and of the products with weights.
    tile : float
        Operations a second of one materialised tile.
    memory : float
        Bytes a second.
    absorbed_start, materialised_start : float
        Seconds that a group of rows takes beside its operations.
    several_start : float
        Seconds more where an absorbed row has several queries.
    """

    absorbed: float
    materialised: float
    projection: float
    tile: float
    memory: float
    absorbed_start: float
    materialised_start: float
    several_start: float


RATES = Rates(
    absorbed=740e12,
    materialised=690e12,
    projection=570e12,
    tile=7.8e12,
    memory=3.5e12,
    absorbed_start=14e-6,
    materialised_start=11e-6,
    several_start=8e-6,
)
"""Of an H200, from ``bench/reports/layer.json``; other devices have other ones, but much the same
proportions."""


@dataclass(frozen=True)
class Forms:
    """What each row of a step takes in both forms.

    Parameters
    ----------
    config : LayerConfig
    query_lens, key_lens : [B], int64
        Keys that the last query of a row sees, its context and itself included.
    """

    config: LayerConfig
    query_lens: NDArray[np.int64]
    key_lens: NDArray[np.int64]

    @cached_property
    def absorbed(self) -> NDArray[np.float64]:
        """Seconds absorbed, [B]."""
        config, mla = self.config, self.config.attention
        pair = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
        attention = pair * self._pairs(self.query_lens) / RATES.absorbed
        reading = self._keys * mla.stored.token_bytes(mla) / RATES.memory
        weights = 2 * config.projected * mla.kv_lora_rank * self.query_lens / RATES.projection
        return np.maximum(attention, reading) + weights

    @cached_property
    def keys_made(self) -> NDArray[np.float64]:
        """Seconds to gather and project the keys and values of materialised rows, [B]."""
        config, mla = self.config, self.config.attention
        latent = mla.kv_lora_rank + mla.qk_rope_head_dim
        gathered = (mla.stored.token_bytes(mla) + latent * mla.dtype.itemsize) / RATES.memory
        products = 2 * config.projected * mla.kv_lora_rank / RATES.projection
        return self._keys * (gathered + max(products, self._moved))

    @cached_property
    def attended(self) -> NDArray[np.float64]:
        """Seconds of materialised attention, were the device full, [B]."""
        padded = -(-self.query_lens // _QUERY_TILE) * _QUERY_TILE
        pairs = self.config.attention.num_heads * self._pairs(padded)
        seconds: NDArray[np.float64] = np.maximum(
            self._pair * pairs / RATES.materialised, self._keys * self._moved
        )
        return seconds

    @cached_property
    def tile(self) -> NDArray[np.float64]:
        """Seconds of one materialised tile, [B]; a step takes the longest at least."""
        return self._keys * (self._pair * _QUERY_TILE / RATES.tile)

    @property
    def _keys(self) -> NDArray[np.float64]:
        return np.where(self.query_lens > 0, self.key_lens, 0).astype(np.float64)

    @property
    def _moved(self) -> float:
        """Seconds to write or read the keys and values of one token."""
        return self.config.projected * self.config.attention.dtype.itemsize / RATES.memory

    @property
    def _pair(self) -> int:
        """Operations of a materialised pair of query and key in one head."""
        return 2 * sum(self.config.prefill.head_dims)

    def _pairs(self, computed: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return pairs of query and key; of a row's own keys those that causal queries see."""
        seen: NDArray[np.float64] = np.maximum(self.key_lens - (self.query_lens - 1) / 2, 0.0)
        return computed.astype(np.float64) * seen


def absorbed_rows(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
) -> int:
    """Return how many leading rows are absorbed, so that the whole step takes least time."""
    forms = Forms(config, query_lens, key_lens)
    absorbed = _up_to(np.add, forms.absorbed)  # of rows before each cut, [B + 1]
    absorbed += _absorbed_start(absorbed, _up_to(np.maximum, query_lens))
    attended = np.maximum(_from(np.add, forms.attended), _from(np.maximum, forms.tile))
    materialised = _from(np.add, forms.keys_made) + attended  # of rows behind each cut, [B + 1]
    materialised += np.where(materialised > 0, RATES.materialised_start, 0.0)
    total = absorbed + materialised
    fewest_materialised = np.argmin(total[::-1])  # rows without queries cost nothing either way
    return int(len(query_lens) - fewest_materialised)


def slowdown(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64], absorbed: int
) -> float:
    """Return how many times as long the step takes as one with each row in its better form.

    So many leading rows are `absorbed`. It is above 1 where rows with few queries stand behind
    rows with many, and 1 for rows that see no keys.
    """
    forms = Forms(config, query_lens, key_lens)
    alone = forms.keys_made + np.maximum(forms.attended, forms.tile)
    is_leading = np.arange(len(query_lens)) < absorbed
    least = _step_seconds(forms, forms.absorbed <= alone)
    return _step_seconds(forms, is_leading) / least if least > 0 else 1.0


def _step_seconds(forms: Forms, is_absorbed: NDArray[np.bool_]) -> float:
    """Return the time of both groups."""
    absorbed = forms.absorbed[is_absorbed].sum()
    absorbed += _absorbed_start(absorbed, forms.query_lens[is_absorbed].max(initial=0))
    rest = ~is_absorbed
    materialised = forms.keys_made[rest].sum()
    materialised += max(forms.attended[rest].sum(), forms.tile[rest].max(initial=0.0))
    materialised += RATES.materialised_start if materialised > 0 else 0.0
    return float(absorbed + materialised)


def _absorbed_start(
    seconds: NDArray[np.float64], longest_query: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return what groups of rows take however short they are; empty ones take nothing."""
    start = RATES.absorbed_start + np.where(longest_query > 1, RATES.several_start, 0.0)
    return np.where(seconds > 0, start, 0.0)


def _up_to(ufunc: np.ufunc, x: NDArray[Any]) -> NDArray[Any]:
    """Return the sum or the maximum of what is before each place, 0 for none, [B + 1]."""
    run: NDArray[Any] = np.append(np.zeros(1, x.dtype), ufunc.accumulate(x))
    return run


def _from(ufunc: np.ufunc, x: NDArray[Any]) -> NDArray[Any]:
    """Return the sum or the maximum of each place and all behind it, 0 for none, [B + 1]."""
    return _up_to(ufunc, x[::-1])[::-1]
