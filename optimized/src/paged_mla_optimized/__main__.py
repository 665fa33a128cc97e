"""``python -m paged_mla_optimized taps DUMP``: what the kernel goes through for one query and head.

``python -m paged_mla_reference explain DUMP --taps FILE`` sets it beside what the rules say.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paged_mla_optimized.inspect.taps import taps_of
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.options import whole
from paged_mla_shared.taps import save_taps


def main(arguments: list[str] | None = None) -> int:
    """Write the taps of one query and head; return 0, or 2 where that cannot be done."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized", description=__doc__)
    commands = parser.add_subparsers(required=True)
    taps = commands.add_parser("taps", help="set TRITON_INTERPRET=1 with it")
    taps.add_argument("dump", type=Path, metavar="DUMP", help="a file of shared/docs/dump.md")
    taps.add_argument("--token", type=whole(0), required=True, metavar="T")
    taps.add_argument("--head", type=whole(0), default=0, metavar="H")
    taps.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        save_taps(taps_of(load_dump(options.dump), options.token, options.head), options.out)
    except (OSError, ValueError, Unsupported) as error:
        print(f"taps: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
