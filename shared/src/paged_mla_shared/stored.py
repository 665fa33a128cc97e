"""Read stored vectors: small steps as bit patterns, for implementations in any language.

``vectors/README.md`` describes the format.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.documents import read_bytes
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.manifest import Entry, Listed, read_manifest
from paged_mla_shared.problem import Batch, Metadata, Problem

FOLDER = Path(__file__).with_name("vectors")


@dataclass(frozen=True)
class Vector:
    """One step with its exact results.

    Parameters
    ----------
    id : str
    problem : Problem
    batch : Batch
    before, after : CacheImage
        The cache before and after the append.
    metadata : Metadata
    out : float64 [T, H, R]
        The exact output.
    lse : float64 [T, H]
        The exact lse.
    out_budget : float64 [T]
        The largest allowed |out - exact| of each token.
    lse_budget : float64 [T, H]
        The largest allowed |lse - exact|.
    """

    id: str
    problem: Problem
    batch: Batch
    before: CacheImage
    after: CacheImage
    metadata: Metadata
    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    out_budget: NDArray[np.float64]
    lse_budget: NDArray[np.float64]


def vector_ids() -> list[str]:
    """Return the ids of all stored vectors."""
    return list(read_manifest(FOLDER))


def load_vector(vector_id: str, folder: Path = FOLDER) -> Vector:
    """Read one stored vector.

    Raises
    ------
    InvalidArgument
        There is no vector with this id, or the manifest or the file is invalid.
    """
    entries = read_manifest(folder)
    if vector_id not in entries:
        raise InvalidArgument("vector_id", repr(vector_id), ", ".join(entries))
    entry = entries[vector_id]
    problem, arrays = entry.problem, stored_arrays(entry, folder)
    poison = arrays["poison"]
    return Vector(
        id=vector_id,
        problem=problem,
        batch=Batch(
            **{name: arrays[name] for name in Batch.__dataclass_fields__ if name in arrays}
        ),
        before=CacheImage(problem.layout, arrays["block_ids"], arrays["blocks_before"], poison),
        after=CacheImage(problem.layout, arrays["block_ids"], arrays["blocks_after"], poison),
        metadata=Metadata(arrays["positions"], arrays["expected_slot_mapping"]),
        out=arrays["out"],
        lse=arrays["lse"],
        out_budget=arrays["out_budget"],
        lse_budget=arrays["lse_budget"],
    )


def stored_arrays(entry: Entry, folder: Path = FOLDER) -> dict[str, NDArray[Any]]:
    """Return the arrays of one manifest entry, by name.

    Raises
    ------
    InvalidArgument
        The file cannot be read, or is too short for one of its arrays.
    """
    path = folder / entry.file
    data = read_bytes(path)
    for array in entry.arrays:
        end = array.offset + array.count * array.numpy_dtype.itemsize
        if end > len(data):
            allowed = f"at most {len(data)}, the end of the file"
            raise InvalidArgument(f"{path}: {array.name!r}", f"an end at byte {end}", allowed)
    return {array.name: _read(data, array) for array in entry.arrays}


def _read(data: bytes, array: Listed) -> NDArray[Any]:
    flat = np.frombuffer(data, array.numpy_dtype, array.count, array.offset)
    return flat.reshape(array.shape).copy()
