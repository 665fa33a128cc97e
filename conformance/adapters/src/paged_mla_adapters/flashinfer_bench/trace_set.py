"""A folder that FlashInfer-Bench reads: definitions, workloads with their tensors, solutions.

The layout of the folder follows ``flashinfer_bench/data/trace_set.py`` of
flashinfer-ai/flashinfer-bench at 40e6ca78.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paged_mla_adapters.flashinfer_bench.definition import OP_TYPE, Definition
from paged_mla_adapters.flashinfer_bench.workloads import Selection
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.safetensors import write_tensors

AUTHOR = "paged-mla"


def export(selection: Selection, folder: Path) -> Iterator[tuple[Definition, int]]:
    """Write a folder; yield each definition and the size of its workloads' tensors in bytes.

    Raises
    ------
    InvalidArgument
        The folder is not empty, or the path is not that of a folder.
    OSError
        A file cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidArgument("FOLDER", folder, "an empty folder, or a path that does not exist")
    (folder / "traces").mkdir(parents=True)
    for definition, workloads in selection.workloads.items():
        _write(folder / "definitions" / OP_TYPE / f"{definition.name}.json", definition.document())
        solution = solution_of(definition)
        place = folder / "solutions" / AUTHOR / OP_TYPE / definition.name
        _write(place / f"{solution['name']}.json", solution)
        lines, size = [], 0
        for workload in workloads:
            name = f"{definition.name}_{workload.case.id}.safetensors"
            path = folder / "blob" / "workloads" / OP_TYPE / definition.name / name
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = workload.tensors()
            write_tensors(path, tensors, {})
            line = workload.document(path.relative_to(folder).as_posix(), tensors)
            lines.append(json.dumps(line))
            size += path.stat().st_size
        table = folder / "workloads" / OP_TYPE / f"{definition.name}.jsonl"
        table.parent.mkdir(parents=True, exist_ok=True)
        table.write_text("\n".join([*lines, ""]))
        yield definition, size
    (folder / "README.md").write_text(_readme(selection))


def solution_of(definition: Definition) -> dict[str, Any]:
    """Return the document of a solution that calls this project's Triton kernels."""
    program = definition.program("solution", [*definition.inputs, *definition.outputs])
    return {
        "name": f"paged_mla_{definition.name}",
        "definition": definition.name,
        "author": AUTHOR,
        "description": "The Triton kernels of paged-mla. Each call concatenates both cache "
        "tensors, which copies the cache.",
        "spec": {
            "language": "triton",
            "target_hardware": ["cuda"],
            "entry_point": "main.py::run",
            "dependencies": ["paged-mla"],
            "destination_passing_style": True,
        },
        "sources": [{"path": "main.py", "content": program}],
    }


def _write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _readme(selection: Selection) -> str:
    lines = [_HEAD, *(f"- {what}: {', '.join(ids)}" for what, ids in selection.left_out.items())]
    return "\n".join([*lines, ""])


_HEAD = """\
# Paged MLA for FlashInfer-Bench

`paged-mla export flashinfer-bench` wrote this folder. Each workload is a case of the conformance
suite of paged-mla and has the id of the case. Solutions need the package `paged-mla` with its extra
`optimized`.

## Left out

These cases attend to a cache, but no definition can express them, or they are too large. Each line
starts with the reason, which is the first property that no definition has or the size:
"""
