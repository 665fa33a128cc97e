"""Write the stored vectors, or check that the reference still computes them.

python -m paged_mla_conformance.meta.vectors --check
python -m paged_mla_conformance.meta.vectors --write
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.suite.trials.trial import Stage
from paged_mla_reference.rules.fp8 import FP8
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.tolerance.budgets import lse_budget, out_budget
from paged_mla_shared.cases import GROUPS, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.manifest import FORMAT, read_manifest
from paged_mla_shared.stored import FOLDER, stored_arrays

CHOSEN: dict[str, tuple[str, ...]] = {
    "decode-bs16": ("float32", "bfloat16", "float16"),
    "extend-bs16": ("bfloat16",),
    "mixed-bs16": ("bfloat16",),
    "masks-tree-full-ragged-padded": ("float32",),
    "empty-many-tokens": ("float32",),
    "append-padded-rows": ("bfloat16",),
    "rope-interleaved-decode": ("float32",),
    "rope-neox-extend": ("float32",),
}

IN_8_BITS = "formats-grown-group"  # the case for vectors in each format of 8 bits


def main(arguments: list[str] | None = None) -> int:
    """Write or check the vectors; return 1 if the check finds a difference, else 0."""
    parser = argparse.ArgumentParser(prog="paged_mla_conformance.meta.vectors", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--write", action="store_true")
    what.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if options.write:
        write_vectors()
        return 0
    stale = stale_vectors()
    for name in stale:
        print(f"{name} differs from the reference; run with --write to update the stored vectors")
    return 1 if stale else 0


def write_vectors() -> None:
    """Write the manifest and every data file."""
    entries: list[dict[str, Any]] = []
    for case, dtype in _chosen():
        entry, data = _packed(case, dtype, _arrays(case, dtype))
        entries.append(entry)
        (FOLDER / entry["file"]).write_bytes(data)
    manifest = {"format": FORMAT, "byte_order": "little", "vectors": entries}
    (FOLDER / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def stale_vectors() -> list[str]:
    """Return the ids of vectors whose stored arrays differ from those that the reference computes.

    The result includes chosen vectors that are not stored, and stored vectors that are not chosen.
    Bytes and integers must be equal. The last bits of float64 outputs may differ, because they
    depend on the order of the sums in a machine's matrix products.
    """
    listed = read_manifest(FOLDER)
    stale = sorted(set(listed) ^ {case.dtype_id(dtype) for case, dtype in _chosen()})
    for case, dtype in _chosen():
        name = case.dtype_id(dtype)
        if name in listed and not _same(stored_arrays(listed[name]), _arrays(case, dtype)):
            stale.append(name)
    return stale


def _chosen() -> list[tuple[Case, str]]:
    cases = {case.id: case for group in GROUPS.values() for case in group}
    plain = [(cases[name], dtype) for name, dtypes in CHOSEN.items() for dtype in dtypes]
    return plain + [
        (replace(cases[IN_8_BITS], cache_format=name, cache_scale=0.03), "bfloat16") for name in FP8
    ]


def _same(stored: dict[str, NDArray[Any]], made: dict[str, NDArray[Any]]) -> bool:
    if stored.keys() != made.keys():
        return False
    for name, array in made.items():
        other = stored[name]
        if other.shape != array.shape or other.dtype != array.dtype:
            return False
        if array.dtype == np.float64:
            if not np.allclose(other, array, rtol=1e-9, atol=1e-12):
                return False
        elif other.tobytes() != array.tobytes():
            return False
    return True


def _arrays(case: Case, dtype: str) -> dict[str, NDArray[Any]]:
    stage = Stage.of(build_steps(case, SMALL, dtype)[0])
    exact, rounded = stage.answers()
    terms = stage.batch.query_width
    derived, keys = metadata(stage.problem, stage.batch), keys_of_tokens(stage.batch)
    arrays: dict[str, NDArray[Any] | None] = {
        **{name: getattr(stage.batch, name) for name in stage.batch.__dataclass_fields__},
        "poison": stage.before.poison,
        "block_ids": stage.after.block_ids,
        "blocks_before": stage.before.read(stage.after.block_ids),
        "blocks_after": stage.after.blocks,
        "positions": derived.positions,
        "expected_slot_mapping": derived.slot_mapping,
        "out": exact.out,
        "lse": exact.lse,
        "out_budget": out_budget(stage.problem.dtype, exact, rounded, keys, terms),
        "lse_budget": lse_budget(exact, rounded, keys, terms),
    }
    return {name: np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}


def _packed(
    case: Case, dtype: str, arrays: dict[str, NDArray[Any]]
) -> tuple[dict[str, Any], bytes]:
    """Return the manifest entry and the data file of one vector."""
    data = bytearray()
    listed = []
    for name, array in arrays.items():
        fields = {"name": name, "dtype": dtype_name(array.dtype), "shape": list(array.shape)}
        listed.append({**fields, "offset": len(data)})
        data += array.tobytes()
    entry = {
        "id": case.dtype_id(dtype),
        "why": case.why,
        "rules": list(case.rules),
        "file": f"{case.dtype_id(dtype)}.bin",
        "problem": asdict(case.problem(SMALL, dtype)),
        "arrays": listed,
    }
    return entry, bytes(data)


if __name__ == "__main__":
    sys.exit(main())
