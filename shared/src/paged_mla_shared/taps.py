"""A file of a kernel's intermediate values for one query token and head.

A file is one of :mod:`paged_mla_shared.safetensors`; its texts are ``paged_mla_taps`` (the
version), ``token`` and ``head``.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.safetensors import read_tensors, write_tensors

VERSION = "1"
_VERSION_KEY = "paged_mla_taps"
_FORMS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "keys": (np.int64, ("K",)),
    "scores": (np.float32, ("K",)),
    "spans": (np.int64, ("S", "2")),
    "highest": (np.float32, ("S",)),
    "total": (np.float32, ("S",)),
    "part_lse": (np.float32, ("S",)),
    "part_out": (np.float32, ("S", "R")),
    "lse": (np.float32, ()),
    "out": (np.float32, ("R",)),
}


@dataclass(frozen=True, kw_only=True)
class Taps:
    """A kernel's intermediate values and output for one query token and head.

    Parameters
    ----------
    token, head : int
    keys : int64 [K]
        The index of each key inside the row, in the order in which the kernel read the keys.
    scores : float32 [K]
        The scaled score of each key.
    spans : int64 [S, 2]
        The index of the first and of the last key of each part of the work.
    highest, total : float32 [S]
        The largest score of each part, and the sum of ``exp(score - highest)``.
    part_lse : float32 [S]
        The lse of each part, in nats.
    part_out : float32 [S, R]
        The output of each part.
    lse : float32 []
        The lse over all parts, in nats.
    out : float32 [R]
        The output over all parts.
    """

    token: int
    head: int
    keys: NDArray[np.int64]
    scores: NDArray[np.float32]
    spans: NDArray[np.int64]
    highest: NDArray[np.float32]
    total: NDArray[np.float32]
    part_lse: NDArray[np.float32]
    part_out: NDArray[np.float32]
    lse: NDArray[np.float32]
    out: NDArray[np.float32]


def save_taps(taps: Taps, path: Path) -> None:
    """Write taps to a file."""
    arrays = {name: getattr(taps, name) for name in _FORMS}
    texts = {_VERSION_KEY: VERSION, "token": str(taps.token), "head": str(taps.head)}
    write_tensors(path, arrays, texts)


def load_taps(path: Path) -> Taps:
    """Read taps from a file.

    Raises
    ------
    InvalidArgument
        The file contains no taps of this version, or is damaged.
    """
    arrays, texts = read_tensors(path)
    if (version := texts.get(_VERSION_KEY)) != VERSION:
        raise InvalidArgument(f"{path}: {_VERSION_KEY}", reprlib.repr(version), repr(VERSION))
    token, head = (_whole(path, name, texts.get(name, "")) for name in ("token", "head"))
    if arrays.keys() != _FORMS.keys():
        raise InvalidArgument(f"{path}: tensors", ", ".join(arrays), ", ".join(_FORMS))
    sizes = {"2": 2}
    for name, (dtype, axes) in _FORMS.items():
        array = arrays[name]
        if array.dtype != dtype or array.ndim != len(axes):
            allowed = f"{np.dtype(dtype)} [{', '.join(axes)}]"
            raise InvalidArgument(f"{path}: {name}", f"{array.dtype} {array.shape}", allowed)
        for axis, size in zip(axes, array.shape, strict=True):
            if sizes.setdefault(axis, size) != size:
                raise InvalidArgument(f"{path}: {name}", f"{axis} = {size}", str(sizes[axis]))
    return Taps(token=token, head=head, **arrays)


def _whole(path: Path, name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidArgument(f"{path}: {name}", reprlib.repr(text), "an integer >= 0")
    return int(text)
