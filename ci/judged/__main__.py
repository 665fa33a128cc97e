"""The command: ``run`` judges kernels, ``page`` writes the page of the results."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from ci.judged import manifest
from ci.judged.manifest import chosen
from ci.judged.page import PAGE, page
from ci.judged.result import read_all
from ci.judged.run import run
from paged_mla_shared.errors import InvalidArgument


def main(arguments: list[str]) -> int:
    """Run a subcommand; return 0, or 2 for a wrong command line.

    A kernel that fails a test does not change the status.
    """
    options, rest = _parser().parse_known_args(arguments)
    try:
        if options.command == "page":
            if rest:
                raise InvalidArgument("arguments", " ".join(rest), "only RESULTS")
            options.page.write_text(page(manifest.kernels(), read_all(options.results)))
            return 0
        if not options.payload.is_dir():
            raise InvalidArgument("--payload", str(options.payload), "a folder that exists")
        payload, out = options.payload.resolve(), options.out.resolve()
        run(
            chosen(options.only),
            payload,
            out,
            rest,
            jobs=options.jobs,
            seconds=options.seconds,
            total=options.total,
        )
    except InvalidArgument as error:
        print(f"ci.judged: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ci.judged", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser(
        "run",
        help="judge kernels",
        description="Judges kernels. Other options, as --quick, are passed to `paged-mla judge`.",
        allow_abbrev=False,
    ).add_argument
    add("--payload", type=Path, required=True, help="the folder with the kernels' files")
    add("--out", type=Path, required=True, help="the folder for results and reports")
    add("--only", default="", metavar="ID,ID", help="only kernels whose ids start with these texts")
    add("--jobs", type=int, default=1, help="the number of kernels at a time (default: 1)")
    add("--seconds", type=float, default=540, help="the limit for each kernel (default: 540)")
    add("--total", type=float, default=math.inf, help="the limit in seconds (default: no limit)")
    written = commands.add_parser("page", help="write the page of results").add_argument
    written("results", type=Path, metavar="RESULTS", help="results.json")
    written("--page", type=Path, default=PAGE, help="the page to write")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
