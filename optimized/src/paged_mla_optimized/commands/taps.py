"""``paged-mla taps``: record the intermediate results of a kernel for one query and head."""

from __future__ import annotations

import sys
from pathlib import Path

from paged_mla_optimized.inspect.taps import taps_of
from paged_mla_shared.documents import one_line
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.folders import check_files
from paged_mla_shared.options import OneLineParser, whole
from paged_mla_shared.taps import save_taps

_ABOUT = """\
Runs the recorded step in Triton's interpreter, which needs TRITON_INTERPRET=1, and saves the
kernel's scores, weights and partial results for one query and head.
"""
_EXAMPLE = """\
example: TRITON_INTERPRET=1 paged-mla taps step.safetensors --token 2 --out taps.safetensors,
then paged-mla explain step.safetensors --taps taps.safetensors
"""


def main(arguments: list[str] | None = None) -> int:
    """Write the taps of one query and head; return 0, or 2 if that is not possible."""
    parser = OneLineParser(prog="paged-mla taps", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument("dump", type=Path, metavar="DUMP", help="a dump; see shared/docs/dump.md")
    parser.add_argument(
        "--token", type=whole(0), required=True, metavar="T", help="the query token"
    )
    parser.add_argument(
        "--head", type=whole(0), default=0, metavar="H", help="the head (default: 0)"
    )
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the file with the taps"
    )
    options = parser.parse_args(arguments)
    try:
        check_files(out=options.out)
        save_taps(taps_of(load_dump(options.dump), options.token, options.head), options.out)
    except (OSError, InvalidArgument, Unsupported) as error:
        print(f"paged-mla taps: {one_line(error)}", file=sys.stderr)
        return 2
    print(one_line(f"wrote {options.out}"))
    return 0
