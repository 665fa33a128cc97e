"""The manifest of stored vectors: the arrays of each step, and their places in the files."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paged_mla_shared.documents import read_object, take_version
from paged_mla_shared.dtypes import NUMPY_DTYPES
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Mask, MaskSpelling, Problem
from paged_mla_shared.strides import SHAPES, is_shape
from paged_mla_shared.typed import build

FORMAT = 1
_PLAIN_NAME = re.compile(r"\w[\w.-]*")
_OWN = {name: np.dtype(name) for name in ("bool", "uint8", "int32", "int64", "float64")}
_DTYPES: dict[str, np.dtype[Any]] = NUMPY_DTYPES | _OWN


@dataclass(frozen=True)
class Listed:
    """An array, stored C-contiguous and little-endian from byte `offset` of the vector's file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises
        ------
        InvalidArgument
            The dtype is unknown, or the shape or the offset is impossible.
        """
        if self.dtype not in _DTYPES:
            raise InvalidArgument("dtype", repr(self.dtype), f"one of {', '.join(_DTYPES)}")
        if min(self.shape, default=0) < 0:
            raise InvalidArgument("shape", self.shape, "lengths >= 0")
        if not is_shape(self.shape, self.numpy_dtype.itemsize):
            raise InvalidArgument("shape", self.shape, SHAPES)
        if self.offset < 0:
            raise InvalidArgument("offset", self.offset, ">= 0")

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The element type."""
        return _DTYPES[self.dtype]

    @property
    def count(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Entry:
    """A vector: its static problem, and the arrays of its file."""

    id: str
    why: str
    rules: tuple[str, ...]
    file: str
    problem: Problem
    arrays: tuple[Listed, ...]

    def __post_init__(self) -> None:
        """Validate the fields.

        Raises
        ------
        InvalidArgument
            The file is in another folder, or the arrays are not those of the problem.
        """
        if not _PLAIN_NAME.fullmatch(self.file):
            raise InvalidArgument("file", repr(self.file), "the name of a file in the same folder")
        for name, words in (("dtype", NUMPY_DTYPES), ("cache_format", FORMATS)):
            word = getattr(self.problem, name)
            if word not in words:
                raise InvalidArgument(f"problem.{name}", repr(word), f"one of {', '.join(words)}")
        listed = {array.name: array for array in self.arrays}
        if len(listed) < len(self.arrays):
            raise InvalidArgument("arrays", "a duplicate name", "each name once")
        expected = _expected(self.problem, listed)
        if missing := expected.keys() - listed.keys() - {"mask", "slot_mapping"}:
            raise InvalidArgument("arrays", f"no {min(missing)}", ", ".join(expected))
        for name, array in listed.items():
            allowed = expected.get(name)
            if (array.dtype, array.shape) != allowed:
                given = f"{array.dtype} {array.shape}"
                raise InvalidArgument(f"arrays: {name!r}", given, f"{allowed or 'no such array'}")


def read_manifest(folder: Path) -> dict[str, Entry]:
    """Return the vectors of a folder by their ids.

    Raises
    ------
    InvalidArgument
        The manifest cannot be read, has another format, or contains an invalid entry.
    """
    path = folder / "manifest.json"
    document = read_object(path)
    take_version(document, "format", FORMAT, str(path))
    if document.get("byte_order") != "little":
        raise InvalidArgument(f"{path}: byte_order", repr(document.get("byte_order")), "'little'")
    entries = build(tuple[Entry, ...], document.get("vectors"), f"{path}: vectors")
    found = {entry.id: entry for entry in entries}
    if len(found) < len(entries):
        raise InvalidArgument(f"{path}: vectors", "a duplicate id", "each id once")
    return found


def _expected(
    problem: Problem, listed: dict[str, Listed]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the dtype and the shape of every array; `listed` determines the lengths of axes."""

    def axis(name: str, number: int = 0) -> int:
        shape = listed[name].shape if name in listed else ()
        return shape[number] if number < len(shape) else 0

    dims, layout, dtype = problem.dims, problem.layout, problem.dtype
    heads, rank, rope = dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim
    tokens, rows, blocks = axis("q_nope"), axis("seq_lens"), axis("block_ids")
    expected: dict[str, tuple[str, tuple[int, ...]]] = {
        "cu_seqlens_q": ("int32", (rows + 1,)),
        "seq_lens": ("int32", (rows,)),
        "block_table": ("int32", (rows, axis("block_table", 1))),
        "q_nope": (dtype, (tokens, heads, rank)),
        "q_pe": (dtype, (tokens, heads, rope)),
        "ckv": (dtype, (tokens, rank)),
        "k_pe": (dtype, (tokens, rope)),
        "slot_mapping": ("int64", (tokens,)),
        "poison": ("uint8", (math.gcd(axis("poison"), layout.block_stride),)),
        "block_ids": ("int64", (blocks,)),
        "blocks_before": ("uint8", (blocks, layout.block_bytes)),
        "blocks_after": ("uint8", (blocks, layout.block_bytes)),
        "positions": ("int64", (tokens,)),
        "expected_slot_mapping": ("int64", (tokens,)),
        "out": ("float64", (tokens, heads, rank)),
        "lse": ("float64", (tokens, heads)),
        "out_budget": ("float64", (tokens,)),
        "lse_budget": ("float64", (tokens, heads)),
    }
    if problem.mask is Mask.TREE:
        packed = problem.mask_spelling is MaskSpelling.PACKED
        shape = (tokens, axis("mask", 1)) if packed else (axis("mask"),)
        expected["mask"] = ("uint8" if packed else "bool", shape)
    return expected
