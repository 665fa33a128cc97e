"""Run the suite on every mutant: ``python -m paged_mla_conformance.meta.mutants``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import repeat
from pathlib import Path

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import RIGHT_BACKEND, RIGHT_IN_EVERY_FORMAT
from paged_mla_conformance.meta.mutants.kill import Kills, NothingAsked, kill
from paged_mla_conformance.meta.mutants.matrix import Matrix
from paged_mla_conformance.meta.mutants.table import table_of
from paged_mla_conformance.run.quick.table import FILE, to_json
from paged_mla_shared.options import whole


def main(arguments: list[str] | None = None) -> int:
    """Print the groups that kill each mutant, and the defects of the suite.

    Return 0 if each mutant fails by a rule that it breaks, and the right backend passes; else 1.
    """
    parser = argparse.ArgumentParser(prog="paged_mla_conformance.meta.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="mutants to run (default: all)")
    parser.add_argument("--workers", type=whole(1), default=os.cpu_count(), help="processes")
    parser.add_argument("-k", metavar="EXPRESSION", help="run only these tests, like -k of pytest")
    parser.add_argument(
        "--page", type=Path, metavar="MARKDOWN", help="write the page, and JSON next to it"
    )
    parser.add_argument("--summary", type=Path, metavar="MARKDOWN", help="write the short page")
    parser.add_argument(
        "--table", action="store_true", help="run every test, and write the table of --quick"
    )
    options = parser.parse_args(arguments)
    if (options.page or options.summary or options.table) and (options.names or options.k):
        parser.error("--page, --summary and --table need every mutant and every test")
    for name in ("page", "summary"):
        path = getattr(options, name)
        if path and not path.parent.is_dir():
            parser.error(f"--{name}: got {path}; allowed: a file in an existing folder")
    unknown = set(options.names) - set(MUTANTS)
    if unknown:
        parser.error(f"these mutants do not exist: {sorted(unknown)}")
    first = RIGHT_IN_EVERY_FORMAT if options.table else RIGHT_BACKEND
    names = [first, *(options.names or MUTANTS)]
    chosen = ("-k", options.k) if options.k else ()
    try:
        right, *kills = _kill_all(names, chosen, options.workers, every=options.table)
    except NothingAsked as error:
        if not chosen:
            raise
        parser.error(f"-k: got {options.k!r}: {error}")
    matrix = Matrix(kills, right)
    idle = [group for group, alone in matrix.alone.items() if not alone]
    print(f"groups whose mutants are all killed by other groups too: {', '.join(idle) or 'none'}")
    print("\n".join(matrix.faults))
    print(matrix.summary())
    if options.page:
        matrix.write(options.page)
    if options.summary:
        options.summary.write_text(matrix.summary_page())
    if options.table:
        FILE.write_text(to_json(table_of(kills, right)))
    return 1 if matrix.faults else 0


def _kill_all(
    names: list[str], chosen: tuple[str, ...], workers: int, *, every: bool
) -> list[Kills]:
    """Run the suite on each mutant in worker processes, and print the groups that kill it."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins would change the suite
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = []
        for k in pool.map(partial(kill, every=every), names, *map(repeat, chosen)):
            print(f"{k.name}: {', '.join(k.by()) or '-'}", flush=True)
            results.append(k)
    return results


if __name__ == "__main__":
    sys.exit(main())
