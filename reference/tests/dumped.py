"""Dumps of small steps, right or wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_reference.explain.hypotheses.ordinary import dump_of
from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dtypes import NUMPY_DTYPES
from paged_mla_shared.dump import Dump
from paged_mla_shared.inputs import build_steps

ROWS = (Row(37, 1), Row(70, 3), Row(0, 0), Row(130, 1), Row(9, 9))


def case(rows: tuple[Row, ...] = ROWS, **fields: Any) -> Case:
    return Case(group="x", name="x", why="x", rules=("S-5",), rows=rows, **fields)


def dumped(
    wrong: str | Oracle = RIGHT,
    dtype: str = "float32",
    of: Case | None = None,
    without: tuple[str, ...] = (),
) -> Dump:
    """Return what a step was given and what an oracle, or a fault by its name, made of it."""
    oracle = CATALOGUE[wrong].change(RIGHT) if isinstance(wrong, str) else wrong
    [step] = build_steps(of or case(), SMALL, dtype)
    dump = dump_of(step, oracle)
    arrays, layout = dict(dump.arrays), dump.problem.layout
    dtype_name, count = layout.format.row(layout.dims)
    row_dtype = NUMPY_DTYPES.get(dtype_name) or np.dtype(dtype_name)
    for when in ("before", "after"):
        raw = arrays.pop(f"bytes_{when}")
        rows = np.ascontiguousarray(layout.rows(raw)).view(row_dtype)
        arrays[f"cache_{when}"] = rows.reshape(len(raw), layout.block_size, count)
        if layout.format.scales_per_block(layout.block_size):
            arrays[f"scales_{when}"] = layout.scales(raw)
    kept = {name: array for name, array in arrays.items() if name not in without}
    return Dump(problem=dump.problem, arrays=kept, origin="a test")


def changed(dump: Dump, **arrays: Any) -> Dump:
    return replace(dump, arrays={**dump.arrays, **arrays})
