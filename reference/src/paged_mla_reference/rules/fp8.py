"""Rule S-11: the 8-bit cache formats, byte for byte.

A cached number is an e4m3 code c (:mod:`paged_mla_reference.rules.e4m3`) and a float32 scale s; its
value is exactly ``c * s``. The arithmetic below is IEEE 754 float32 arithmetic: each operation
rounds to nearest, ties to even, and keeps subnormal numbers. Tokens are first widened to float32,
which is exact.

Storing
    A number x becomes ``e4m3(x / s)``: one division, then one rounding to e4m3.
Scales computed from the data
    ``s = max(amax / 448, 2^-126)``, where amax is the largest finite ``|x|`` of all numbers that
    share s. Infinities and NaN are ignored. If all numbers are zero, s is 2^-126. Readers accept
    any finite float32 scale that is not negative, whether or not it is a power of two.

``fp8_e4m3``
    The layer has one scale, which the caller passes. Latent and key are both divided by it.
``fp8_ds_mla``
    Each quarter of the latent has its own scale, which is computed from the data and stored in the
    token's slot. The key is stored as bfloat16: the bits of a bfloat16 key are copied, and other
    types are rounded to nearest even; their NaN becomes 0x7fff.
``fp8_block_token``
    Each token has one scale, computed from the data of its latent and key together.
``fp8_block_group``
    Each ``block_size / 4`` tokens have one scale for their latents and keys together;
    :func:`_store_groups` specifies it.
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
    """Return the scale of each line of numbers [..., n], computed from its data, float32 [...]."""
    amax = np.abs(np.where(np.isfinite(x), x, np.float32(0))).max(axis=-1)
    return np.asarray(np.maximum(amax / np.float32(LARGEST), SMALLEST_SCALE), np.float32)


def quantize(x: NDArray[np.float32], scale: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the e4m3 codes of ``x / scale``, uint8 [...]; `scale` broadcasts."""
    with np.errstate(over="ignore", invalid="ignore"):  # inf encodes as 448; signaling NaN
        return encode(x / scale)


def _codes(slots: Slots, field: str) -> NDArray[np.uint8]:
    """Return a writable view of the codes of one field of all slots, [m, block_size, count]."""
    return slots.field(field).view(np.uint8)


def _write(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any], scale: NDArray[Any]) -> None:
    """Write latents and keys, divided by one scale per token, [n, 1], or by one common scale."""
    _codes(slots, "ckv")[slots.at] = quantize(to_float32(ckv), scale)
    _codes(slots, "k_pe")[slots.at] = quantize(to_float32(k_pe), scale)


def _read(slots: Slots, scale: NDArray[Any]) -> Tokens:
    """Return latents and keys in float64, which holds every product of a code and a scale."""
    ckv, k_pe = (widen(decode(_codes(slots, name)[slots.at])) for name in ("ckv", "k_pe"))
    return ckv * widen(scale), k_pe * widen(scale)


def to_float32(x: NDArray[Any]) -> NDArray[np.float32]:
    """Return numbers as float32; this is exact for every dtype of a problem."""
    with np.errstate(invalid="ignore"):  # signaling NaN
        return np.asarray(x, np.float32)


def _layer_scale(slots: Slots) -> NDArray[np.float32]:
    return np.array(slots.layout.scale, np.float32)


def _store_flat(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Store latents and keys divided by the scale of the layer."""
    _write(slots, ckv, k_pe, _layer_scale(slots))


def _load_flat(slots: Slots) -> Tokens:
    return _read(slots, _layer_scale(slots))


def _store_tokens(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Store each token divided by its own scale."""
    scale = scale_of(to_float32(np.hstack([ckv, k_pe])))
    _write(slots, ckv, k_pe, scale[:, None])
    slots.scales[slots.scale_at] = scale


def _load_scaled(slots: Slots) -> Tokens:
    return _read(slots, slots.scales[slots.scale_at][:, None])


def _store_groups(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Store each token divided by the scale of its group; that scale can grow with new tokens.

    An append does this for each group that it writes to, for tokens in any order:

    1. Compute ``new = max(amax / 448, 2^-126)`` over the tokens that the append writes to the
       group.
    2. Keep the tokens in the group's slots below the lowest written slot, provided that the group's
       current scale, ``old``, is finite and above 0. The group's other slots are ignored.
    3. Set the group's scale to ``max(old, new)`` if a token is kept, and to ``new`` otherwise.
    4. If the scale is now larger than ``old``, replace the codes c of kept tokens by
       ``e4m3((c * old) / scale)``, with each operation rounded to float32. Otherwise, leave them
       unchanged.
    5. Store the tokens with the group's scale.

    A group is filled from its first slot on: each slot below a written slot holds a token, or the
    same append writes it. This has three consequences. An append that starts at a group's first
    slot starts the group again. Drafts that are written again keep the tokens before them. The
    bytes that a longer append stored behind the last token stay unchanged but have another scale;
    nothing may read them (S-9). A copy of a block copies its bytes and scales. Tokens share scales,
    so the value that is read for a token depends on the tokens that its group has received and on
    how appends grouped them, rejected drafts included. In this format S-19 holds except for that.
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
    """Return the lowest of the `places` [n] in each group; groups are numbered from 0."""
    lowest = np.full(group.max(initial=-1) + 1, places.max(initial=0))
    np.minimum.at(lowest, group, places)
    return lowest


def _store_rows(slots: Slots, ckv: NDArray[Any], k_pe: NDArray[Any]) -> None:
    """Store each scale group of a latent divided by its own scale; store keys in bfloat16."""
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
    """Return latents [n, R] as scale groups, [n, scales, R / scales]."""
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
