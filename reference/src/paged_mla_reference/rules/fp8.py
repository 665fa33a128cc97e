"""Rule S-11: the cache formats of 8 bits, byte for byte.

A cached number is an e4m3 code c (:mod:`paged_mla_reference.rules.e4m3`) and a float32 scale s; its
value is ``c * s``, exactly. Everything below is float32 arithmetic as IEEE 754 has it, each
operation rounded to nearest, ties to even, subnormal numbers kept. Tokens are widened to float32
first, which is exact.

Storing
    A number x becomes ``e4m3(x / s)``: one division, then one rounding to e4m3.
Scales taken from the data
    ``s = max(amax / 448, 2^-126)``, where amax is the largest finite ``|x|`` of all that share s:
    infinities and NaN do not count. All zeros give 2^-126. Readers take any finite float32 scale
    that is not negative, powers of two as well as others.

``fp8_e4m3``
    One scale of the layer, which the caller gives; latent and key are both divided by it.
``fp8_ds_mla``
    Each quarter of the latent has its own scale, from the data, inside the row. The key is stored
    as bfloat16: bits of bfloat16 are copied, other types rounded to nearest even, their NaN to
    0x7fff.
``fp8_block_token``
    One scale per token, from the data, of latent and key together.
``fp8_block_group``
    One scale per ``block_size / 4`` tokens, of latents and keys together; :func:`_store_groups`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.e4m3 import LARGEST, decode, encode
from paged_mla_reference.rules.rounding import round_to, widen
from paged_mla_reference.rules.slots import Encoding, Slots, Tokens
from paged_mla_shared.dtypes import numpy_dtype

SMALLEST_SCALE = np.float32(2.0**-126)
_BF16_NAN = 0x7FFF


def scale_of(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the scale that each line of numbers [..., n] takes from its data, float32 [...]."""
    amax = np.abs(np.where(np.isfinite(x), x, np.float32(0))).max(axis=-1)
    return np.asarray(np.maximum(amax / np.float32(LARGEST), SMALLEST_SCALE), np.float32)


def quantize(x: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the codes of numbers, uint8 [...]; scales broadcast."""
    with np.errstate(over="ignore", invalid="ignore"):  # past float32 is past 448; signalling NaN
        return encode(x / scale)


def _codes(slots: Slots, field: str) -> NDArray[np.uint8]:
    """View one field of all rows as codes, [m, block_size, count], to be read and written."""
    return slots.field(field).view(np.uint8)


def _write(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any], scale: NDArray[Any]) -> None:
    """Write latents and keys divided by one scale for each token, [n, 1], or for all."""
    _codes(slots, "ckv")[slots.at] = quantize(to_float32(ckv), scale)
    _codes(slots, "k_pe")[slots.at] = quantize(to_float32(k_pe), scale)


def _read(slots: Slots, scale: NDArray[Any]) -> Tokens:
    """Return latents and keys, float64, which holds every product of a code and a scale."""
    ckv, k_pe = (widen(decode(_codes(slots, name)[slots.at])) for name in ("ckv", "k_pe"))
    return ckv * widen(scale), k_pe * widen(scale)


def to_float32(x: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as float32; exact for every type of tokens."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return np.asarray(x, np.float32)


def _layer_scale(slots: Slots) -> NDArray[np.float32]:
    return np.array(slots.layout.scale, np.float32)


def _store_flat(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Divide everything by the scale of the layer."""
    _write(slots, ckv, k_pe, _layer_scale(slots))


def _load_flat(slots: Slots) -> Tokens:
    return _read(slots, _layer_scale(slots))


def _store_tokens(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Divide each token by its own scale."""
    scale = scale_of(to_float32(np.hstack([ckv, k_pe])))
    _write(slots, ckv, k_pe, scale[:, None])
    slots.scales[slots.scale_at] = scale


def _load_scaled(slots: Slots) -> Tokens:
    return _read(slots, slots.scales[slots.scale_at][:, None])


def _store_groups(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Divide each token by the scale of its group, which grows with what joins it.

    For each group that an append writes to, whatever the order of its tokens:

    1. ``new = max(amax / 448, 2^-126)`` over the tokens that it writes there.
    2. Tokens in slots of the group below the lowest one that it writes are kept, provided the
       group's scale so far, ``old``, is finite and above 0. Nothing else of the group counts.
    3. The group's scale becomes ``max(old, new)`` if a token is kept, else ``new``.
    4. Where that is more than ``old``, the codes c of kept tokens become
       ``e4m3((c * old) / scale)``, each operation rounded to float32. Else they stay.
    5. The tokens are stored with the group's scale.

    Slots are filled from a group's first one on: what lies below a written slot is a token, or is
    written with it. So an append from a group's first slot on starts it anew; drafts that are
    written again keep what lies before them; and what a longer append left behind the last token
    is as it was, byte for byte, with another scale (nothing may read it, S-9). A copy of a block
    copies its bytes and scales. As tokens share scales, what one reads as depends on which tokens
    its group has seen and in which appends, rejected drafts among them: here S-19 holds up to that.
    """
    x = to_float32(np.hstack([ckv, k_pe]))
    size = slots.layout.block_size // slots.scales.shape[1]
    block, group = slots.scale_at
    groups, of_token = np.unique(np.stack([block, group], axis=1), axis=0, return_inverse=True)
    of_token = of_token.reshape(-1)
    new = np.zeros(len(groups), np.float32)
    np.maximum.at(new, of_token, scale_of(x))
    first = lowest_of(slots.token % size, of_token)
    old = slots.scales[groups[:, 0], groups[:, 1]]
    keeps = (first > 0) & np.isfinite(old) & (old > 0)
    scale = np.where(keeps, np.maximum(old, new), new)
    for grown in np.flatnonzero(keeps & (scale > old)):
        b, start = groups[grown, 0], groups[grown, 1] * size
        for field in ("ckv", "k_pe"):
            kept = _codes(slots, field)[b, start : start + first[grown]]
            kept[...] = quantize(decode(kept) * old[grown], scale[grown])
    slots.scales[groups[:, 0], groups[:, 1]] = scale
    _write(slots, ckv, k_pe, scale[of_token][:, None])


def lowest_of(places: NDArray[np.int64], group: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the lowest place that tokens [n] have in each of their groups, numbered from 0."""
    lowest = np.full(group.max(initial=-1) + 1, places.max(initial=0))
    np.minimum.at(lowest, group, places)
    return lowest


def _store_rows(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Divide each share of a latent by its own scale; keep keys in bfloat16."""
    shares = _shares(slots, to_float32(ckv))
    scale = scale_of(shares)
    _codes(slots, "ckv")[slots.at] = quantize(shares, scale[..., None]).reshape(ckv.shape)
    slots.field("ckv_scale")[slots.at] = scale
    slots.field("k_pe")[slots.at] = _bfloat16(k_pe)


def _load_rows(slots: Slots) -> Tokens:
    ckv = widen(decode(_codes(slots, "ckv")[slots.at]))
    scale = widen(slots.field("ckv_scale")[slots.at])
    values = _shares(slots, ckv) * scale[..., None]
    return values.reshape(ckv.shape), slots.field("k_pe")[slots.at]


def _shares(slots: Slots, ckv: NDArray[Any]) -> NDArray[Any]:
    """Return latents [n, R] cut into what shares a scale, [n, scales, R / scales]."""
    shares = slots.layout.format.inline_scales
    return ckv.reshape(len(ckv), shares, ckv.shape[1] // shares)


def _bfloat16(x: NDArray[Any]) -> NDArray[Any]:
    if x.dtype == numpy_dtype("bfloat16"):
        return x
    rounded = round_to(widen(x), "bfloat16")
    return np.where(np.isnan(x), np.uint16(_BF16_NAN), rounded.view(np.uint16)).view(rounded.dtype)


FP8 = {
    "fp8_e4m3": Encoding(_store_flat, _load_flat),
    "fp8_ds_mla": Encoding(_store_rows, _load_rows),
    "fp8_block_token": Encoding(_store_tokens, _load_scaled),
    "fp8_block_group": Encoding(_store_groups, _load_scaled),
}
