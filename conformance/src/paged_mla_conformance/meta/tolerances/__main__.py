"""Check mutants with fixed tolerances: ``python -m paged_mla_conformance.meta.tolerances``."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import FLOAT32, RIGHT_BACKEND
from paged_mla_conformance.meta.tolerances.asked import asked
from paged_mla_conformance.meta.tolerances.section import renew, section
from paged_mla_conformance.meta.tolerances.verdicts import Check, Verdict, verdict
from paged_mla_shared.options import whole


def main(arguments: list[str] | None = None) -> int:
    """Print the checks that find each mutant; return 1 if a check refuses the right backend."""
    parser = argparse.ArgumentParser(
        prog="paged_mla_conformance.meta.tolerances", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="mutants to run (default: all)")
    parser.add_argument("--workers", type=whole(1), default=os.cpu_count(), help="processes")
    parser.add_argument("--page", type=Path, metavar="MARKDOWN", help="replace its last section")
    options = parser.parse_args(arguments)
    if options.page and options.names:
        parser.error("--page needs every mutant")
    if options.page and not options.page.is_file():
        parser.error(f"--page: got {options.page}; allowed: an existing file")
    if unknown := set(options.names) - set(MUTANTS):
        parser.error(f"these mutants do not exist: {sorted(unknown)}")
    right, *verdicts = _verdicts([RIGHT_BACKEND, *(options.names or MUTANTS)], options.workers)
    if right.found:
        print(f"checks refuse the right backend: {right.found}")
        return 1
    if options.page:
        cases = asked(FLOAT32)
        renew(options.page, section(verdicts, len(cases), sum(case.expressed for case in cases)))
    return 0


def _verdicts(names: list[str], workers: int) -> list[Verdict]:
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        results = []
        for found in pool.map(verdict, names):
            noticing = "; ".join(check for check in Check if check in found.found)
            print(f"{found.name}: {noticing or '-'}", flush=True)
            results.append(found)
    return results


if __name__ == "__main__":
    sys.exit(main())
