"""Run a step on every careless kernel: ``python -m paged_mla_adapters.mutants``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paged_mla_adapters.mutants.careless import MUTANTS
from paged_mla_adapters.mutants.kill import fault_in
from paged_mla_adapters.mutants.page import with_section


def main(arguments: list[str] | None = None) -> int:
    """Print the result of each careless kernel.

    Parameters
    ----------
    arguments : list of str or None
        The command line; ``None`` uses the arguments of the process.

    Returns
    -------
    int
        0 if the guard of each kernel that can run on this machine finds it, otherwise 1.
    """
    parser = argparse.ArgumentParser(prog="paged_mla_adapters.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="kernels to run (default: all)")
    parser.add_argument("--summary", type=Path, metavar="MARKDOWN", help="the page to update")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(MUTANTS):
        parser.error(f"unknown mutants {sorted(unknown)}; allowed: {', '.join(MUTANTS)}")
    asked = options.names or list(MUTANTS)
    killed, survived, left = 0, 0, 0
    for mutant in map(MUTANTS.__getitem__, asked):
        if lacking := mutant.guard.lacks():
            left += 1
            print(f"{mutant.name}: skipped, it needs {lacking}")
        elif fault := fault_in(mutant):
            survived += 1
            print(f"{mutant.name} {fault}")
        else:
            killed += 1
            print(f"{mutant.name}: killed by {mutant.guard.name}")
    total = len(asked)
    print(f"{killed} of {total} careless kernels killed, {survived} survived, {left} skipped")
    if options.summary and not survived:
        options.summary.write_text(with_section(options.summary.read_text()))
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
