"""Explain dumps of every mutant, of single faults and of right steps, and count right explanations.

``python -m paged_mla_conformance.meta.explained --page out/explained.md``
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

from paged_mla_conformance.meta.explained.dumps import (
    Failed,
    failures,
    tests_of_the_table,
    tests_that_kill,
)
from paged_mla_conformance.meta.explained.healthy import healthy
from paged_mla_conformance.meta.explained.page import Case, Results
from paged_mla_conformance.meta.explained.single import single_faults
from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_reference.explain.explanation import Explanation, explain
from paged_mla_reference.explain.joint_explanation import explain_jointly
from paged_mla_reference.faults import Kind
from paged_mla_shared.dump import save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.folders import make_folders
from paged_mla_shared.options import whole

MOST_DUMPS = 3  # of a mutant; dumps are added until exactly one fault fits all of them


def main(arguments: list[str] | None = None) -> int:
    """Print the results; return 1 if an explanation calls a right step broken, else 0."""
    parser = argparse.ArgumentParser(
        prog="paged_mla_conformance.meta.explained", description=__doc__
    )
    parser.add_argument("names", nargs="*", metavar="MUTANT", help="mutants to run (default: all)")
    parser.add_argument(
        "--matrix",
        type=Path,
        metavar="JSON",
        help="a matrix of nox -s mutants (default: the table of the quick verdict)",
    )
    parser.add_argument("--single", type=whole(0), default=30, help="number of single faults")
    parser.add_argument("--healthy", type=whole(0), default=200, help="number of right steps")
    parser.add_argument("--page", type=Path, metavar="MARKDOWN", help="write the page")
    parser.add_argument("--save", type=Path, metavar="FOLDER", help="keep the dumps of mutants")
    options = parser.parse_args(arguments)
    unknown = set(options.names) - set(MUTANTS)
    if unknown:
        parser.error(
            f"these mutants do not exist: {sorted(unknown)}; use names of meta.mutants.MUTANTS"
        )
    try:
        kills = tests_that_kill(options.matrix) if options.matrix else tests_of_the_table()
    except InvalidArgument as error:
        parser.error(f"--matrix: {error}; nox -s mutants writes a matrix to out/mutants.json")
    warnings.simplefilter("ignore")
    results = Results()
    for name, dump in healthy(options.healthy):
        found = explain(dump)
        results.healthy += 1
        if found.is_broken:
            results.accused.append(f"{name}: {found.verdict}")
            print(results.accused[-1], flush=True)
    for name in options.names or MUTANTS:
        case = _mutant(name, kills.get(name, []), options.save)
        results.mutants.append(case)
        print(case.line, flush=True)
    for fault in single_faults(options.single):
        started = time.process_time()
        found = explain(fault.dump)
        case = _case(fault.what, "", found, fault.rules, time.process_time() - started)
        results.single.append(case)
        print(case.line, flush=True)
    print(results.summary())
    if options.page:
        make_folders(options.page)
        options.page.write_text(results.markdown())
    return 1 if results.accused else 0


def _mutant(name: str, tests: list[str], folder: Path | None) -> Case:
    """Explain dumps of a mutant, and save them if `folder` is passed.

    Only kernel faults get more than one dump.
    """
    fault = MUTANTS[name]
    if fault.kind is Kind.ENGINE:
        return Case(name, "", why="the schedule is wrong, and the output of the step is right")
    found = failures(name, tests)
    first = next(found, None)
    if first is None:
        return Case(name, tests[0] if tests else "", why="no step shows the fault")
    if folder is not None:
        _keep(first, folder / f"{name}.safetensors")
    started = time.process_time()
    explanations = [explain(first.dump)]
    seconds = time.process_time() - started
    case = _case(name, first.test, explanations[0], fault.rules, seconds)
    if fault.kind is not Kind.KERNEL:
        return case
    shared = explain_jointly(explanations)
    while len(shared.best) != 1 and len(explanations) < MOST_DUMPS:
        another = next(found, None)
        if another is None:
            break
        if folder is not None:
            number = len(explanations) + 1
            _keep(another, folder / f"{name}-{number}.safetensors")
        explanations.append(explain(another.dump))
        shared = explain_jointly(explanations)
    names = [fit.hypothesis.name for fit in shared.fits]
    return replace(
        case,
        known=True,
        dumps=len(explanations),
        shared_place=names.index(name) + 1 if name in names else 0,
        shared_best=names[0] if shared.best else "",
        shared_alike=len(shared.best),
    )


def _keep(failed: Failed, path: Path) -> None:
    make_folders(path)
    save_dump(replace(failed.dump, origin=f"mutant {failed.mutant}, {failed.test}"), path)


def _case(name: str, test: str, found: Explanation, rules: tuple[str, ...], seconds: float) -> Case:
    first = found.found.first
    names = [fit.hypothesis.name for fit in found.fits]
    alike = [f.hypothesis.name for f in found.fits if f.explains == found.fits[0].explains]
    return Case(
        name,
        test,
        rule="" if first is None else first.rule,
        rules=rules,
        best=names[0] if found.best else "",
        place=names.index(name) + 1 if name in names else 0,
        alike=len(alike) if name in alike else 0,
        seconds=seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
