"""Stored vectors: small whole steps as bit patterns, for implementations in any language.

The format is described in ``vectors/README.md``; this module is its NumPy reader.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import NUMPY_DTYPES
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import (
    Batch,
    Mask,
    MaskSpelling,
    Metadata,
    Problem,
    Rope,
    RopePairing,
    Yarn,
)

FOLDER = Path(__file__).with_name("vectors")
MANIFEST = FOLDER / "manifest.json"


@dataclass(frozen=True)
class Vector:
    """One step with its exact answer.

    Parameters
    ----------
    id : str
    problem : Problem
    batch : Batch
    before, after : CacheImage
        The cache before and after the append.
    metadata : Metadata
    out : float64 [T, H, R]
    lse : float64 [T, H]
    out_budget : float64 [T]
        Largest allowed |out - exact| of each token.
    lse_budget : float64 [T, H]
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
    return [entry["id"] for entry in json.loads(MANIFEST.read_text())["vectors"]]


def load_vector(vector_id: str) -> Vector:
    """Read one stored vector."""
    entries = json.loads(MANIFEST.read_text())["vectors"]
    entry = next(e for e in entries if e["id"] == vector_id)
    arrays = stored_arrays(entry)
    problem = problem_from_json(entry["problem"])
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


def stored_arrays(entry: dict[str, Any]) -> dict[str, NDArray[Any]]:
    """Return the arrays of one manifest entry, by name."""
    data = (FOLDER / entry["file"]).read_bytes()
    return {array["name"]: _array(data, array) for array in entry["arrays"]}


def problem_from_json(fields: dict[str, Any]) -> Problem:
    """Return the problem that ``dataclasses.asdict`` turned into `fields`."""
    rope = fields["rope"]
    if rope is not None:
        yarn = Yarn(**rope["yarn"]) if rope["yarn"] else None
        rope = Rope(RopePairing(rope["pairing"]), rope["theta"], yarn)
    return Problem(
        **{
            **fields,
            "dims": MlaDims(**fields["dims"]),
            "mask": Mask(fields["mask"]),
            "mask_spelling": MaskSpelling(fields["mask_spelling"]),
            "rope": rope,
        }
    )


def _array(data: bytes, entry: dict[str, Any]) -> NDArray[Any]:
    dtype = NUMPY_DTYPES.get(entry["dtype"]) or np.dtype(entry["dtype"])
    count = int(np.prod(entry["shape"], dtype=np.int64))
    flat = np.frombuffer(data, dtype, count, entry["offset"])
    return flat.reshape(entry["shape"]).copy()
