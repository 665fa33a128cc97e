"""``paged-mla export``: write the suite's cases for tools of other projects."""

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
solutions that call this project's kernels. Lists the cases that are left out.
"""
_EXAMPLE = "example: paged-mla export flashinfer-bench out/trace_set"
_FORMATS = ("flashinfer-bench",)
_USAGE_ERROR = 2


def main(arguments: list[str] | None = None) -> int:
    """Write a folder with definitions, workloads and solutions.

    Parameters
    ----------
    arguments : list of str or None
        The command line; ``None`` uses the arguments of the process.

    Returns
    -------
    int
        0, or 2 if the folder cannot be written.
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
    print(f"Wrote {len(workloads)} workloads of {len(cases)} cases. These cases that attend to a")
    print("cache were left out, because no definition can express them or they are too large:")
    for what, ids in selection.left_out.items():
        print(f"  {len(ids):3} {what}")
    print(printable(f"{folder / 'README.md'} lists their names."))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(prog="paged-mla export", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument(
        "format", type=one_of(_FORMATS), metavar="FORMAT", help="the only format: flashinfer-bench"
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="an empty or a new folder")
    return parser
