"""Which rows of a step are absorbed and which materialised: a cost model on the host.

Times of a row of q queries that see k keys, the row's context included, with H heads (S-21):

- *absorbed*: every pair of query and key costs ``2 H (2 R + P)`` operations, its attention at least
  the time to read ``k`` cached tokens; and every query ``2 H R (N + V)`` for both projections.
- *materialised*: every pair costs ``2 H (N + P + V)``, with queries in tiles; every key
  ``2 H R (N + V)`` for its projection, ``H (N + V)`` elements written and read, and before that its
  cached bytes read and ``R + P`` elements written.

Long contexts of DeepSeek's heads so cross where 768 q = 131072: at about 170 queries, whatever the
heads, were all operations as fast. :data:`RATES` has how fast each kind is, and what a group of
rows takes however short it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
    memory : float
        Bytes a second.
    absorbed_start, materialised_start : float
        Seconds that a group of rows takes beside its operations.
    """

    absorbed: float
    materialised: float
    projection: float
    memory: float
    absorbed_start: float
    materialised_start: float


RATES = Rates(
    absorbed=550e12,
    materialised=600e12,
    projection=650e12,
    memory=3.5e12,
    absorbed_start=15e-6,
    materialised_start=20e-6,
)
"""Of an H200; other devices have other ones, but much the same proportions."""


def absorbed_seconds(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the time of each row absorbed, [B]."""
    mla = config.attention
    pair = 2 * mla.num_heads * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim)
    attention = pair * _pairs(query_lens, query_lens, key_lens) / RATES.absorbed
    reading = np.where(query_lens > 0, key_lens, 0) * mla.stored.token_bytes(mla) / RATES.memory
    weights = 2 * config.projected * mla.kv_lora_rank * query_lens / RATES.projection
    return np.maximum(attention, reading) + weights


def materialised_seconds(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return the time of each row materialised, [B]."""
    mla = config.attention
    keys = np.where(query_lens > 0, key_lens, 0)
    latent = mla.kv_lora_rank + mla.qk_rope_head_dim
    gathered = (mla.stored.token_bytes(mla) + latent * mla.dtype.itemsize) * keys / RATES.memory
    moved = config.projected * mla.dtype.itemsize * keys / RATES.memory
    products = 2 * config.projected * mla.kv_lora_rank * keys / RATES.projection
    pair = 2 * mla.num_heads * sum(config.prefill.head_dims)
    padded = -(-query_lens // _QUERY_TILE) * _QUERY_TILE
    attention = pair * _pairs(padded, query_lens, keys) / RATES.materialised
    projecting = np.maximum(products, moved)
    seconds: NDArray[np.float64] = gathered + projecting + np.maximum(attention, moved)
    return seconds


def absorbed_rows(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
) -> int:
    """Return how many leading rows are absorbed, so that the whole step takes least time."""
    absorbed = _sums(absorbed_seconds(config, query_lens, key_lens))  # of rows before each, [B + 1]
    materialised = _sums(materialised_seconds(config, query_lens, key_lens))
    rest = materialised[-1] - materialised
    total = absorbed + np.where(absorbed > 0, RATES.absorbed_start, 0)
    total += rest + np.where(rest > 0, RATES.materialised_start, 0)
    fewest_materialised = np.argmin(total[::-1])  # rows without queries cost nothing either way
    return int(len(query_lens) - fewest_materialised)


def slowdown(
    config: LayerConfig, query_lens: NDArray[np.int64], key_lens: NDArray[np.int64], absorbed: int
) -> float:
    """Return how many times as long the step takes as one with each row in its better form.

    So many leading rows are `absorbed`. It is above 1 where rows with few queries stand behind
    rows with many.
    """
    forms = (
        absorbed_seconds(config, query_lens, key_lens),
        materialised_seconds(config, query_lens, key_lens),
    )
    is_leading = np.arange(len(query_lens)) < absorbed
    return _step_seconds(*forms, is_leading) / _step_seconds(*forms, forms[0] <= forms[1])


def _step_seconds(
    absorbed: NDArray[np.float64], materialised: NDArray[np.float64], is_absorbed: NDArray[np.bool_]
) -> float:
    """Return the time of both groups."""
    groups = (
        (absorbed[is_absorbed].sum(), RATES.absorbed_start),
        (materialised[~is_absorbed].sum(), RATES.materialised_start),
    )
    return sum(float(seconds) + start for seconds, start in groups if seconds > 0)


def _pairs(
    computed: NDArray[np.int64], query_lens: NDArray[np.int64], key_lens: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Return pairs of query and key, of a row's own keys only those that causal queries see."""
    seen: NDArray[np.float64] = np.maximum(key_lens - (query_lens - 1) / 2, 0.0)
    return computed.astype(np.float64) * seen


def _sums(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([np.zeros(1), np.cumsum(x)])
