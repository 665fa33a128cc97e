"""``paged-mla export``: writes the suite's cases for other projects' tools."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paged_mla_adapters.flashinfer_bench.trace_set import export
from paged_mla_adapters.flashinfer_bench.workloads import select
from paged_mla_shared.documents import one_line, printable
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.options import OneLineParser, one_of

_ABOUT = """\
Writes cases of the suite as workloads of FlashInfer-Bench, with definitions of paged MLA and with
solutions by this project's kernels. What no definition can ask is left out, and listed.
"""
_EXAMPLE = "example: paged-mla export flashinfer-bench out/trace_set"
_FORMATS = ("flashinfer-bench",)
_USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Write a folder; return 0, or 2 where it cannot be written.

    Returns
    -------
    int
    """
    folder: Path = _parser().parse_args(arguments).folder
    selection = select()
    try:
        for definition, size in export(selection, folder):
            count = len(selection.workloads[definition])
            print(f"{definition.name}: {count} workloads, {size / 2**20:.0f} MiB", flush=True)
    except (InvalidArgument, OSError) as error:
        print(printable(f"paged-mla export: {one_line(error)}"), file=sys.stderr)
        return _USAGE_ERROR
    workloads = [workload for of in selection.workloads.values() for workload in of]
    cases = {workload.case.id for workload in workloads}
    print(f"{len(workloads)} workloads of {len(cases)} cases. Left out of those that attend to a")
    print("cache, for what no definition has, or for their size:")
    for what, ids in selection.left_out.items():
        print(f"  {len(ids):3} {what}")
    print(printable(f"{folder / 'README.md'} names each of them."))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla export", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument(
        "format", type=one_of(_FORMATS), metavar="FORMAT", help="flashinfer-bench, the only one"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an empty or a new folder")
    return parser
