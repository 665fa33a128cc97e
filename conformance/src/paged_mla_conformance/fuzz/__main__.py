"""Search for what breaks a backend: the corpus, numbered schedules, then hypothesis."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paged_mla_conformance.fuzz.corpus import check_case, corpus_files, is_case, load_case
from paged_mla_conformance.fuzz.sweep import Sweep
from paged_mla_conformance.plugin import load_backend
from paged_mla_conformance.profile import ALL_DTYPES, CORE
from paged_mla_conformance.traces import TraceTrial
from paged_mla_reference.simulator.scenario import load_scenario
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import PRESETS, MlaDims


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked; return 0 when every answer was right."""
    parser = argparse.ArgumentParser(prog="paged_mla_conformance.fuzz", description=__doc__)
    parser.add_argument("--backend", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--dims", choices=sorted(PRESETS), help="model dims (default: the mode's)")
    parser.add_argument("--schedules", type=int, default=20, help="numbered schedules, at least")
    parser.add_argument("--steps", type=int, default=0, help="steps of them, at least")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--examples", type=int, default=50, help="schedules that hypothesis tries")
    parser.add_argument("--cases", type=int, default=100, help="steps that hypothesis tries")
    parser.add_argument("--skip-corpus", action="store_true", help="do not ask past failures first")
    parser.add_argument("--seed", type=int, default=0, help="of hypothesis")
    parser.add_argument("--replay", type=Path, metavar="JSON", help="run one replay file instead")
    parser.add_argument("--folder", type=Path, default=Path(), help="where a replay file goes")
    options = parser.parse_args(arguments)
    backend = load_backend(options.backend)
    dims = PRESETS[options.dims or CORE[backend.mode].dims]
    dtypes = tuple(dtype for dtype in ALL_DTYPES if dtype in backend.capabilities.dtypes)
    if options.replay:
        return 0 if replay(backend, dims, dtypes[0], options.replay) else 1
    corpus = [] if options.skip_corpus else corpus_files()
    right = [replay(backend, dims, dtypes[0], path) for path in corpus]
    if not all(right):
        return 1
    if options.schedules + options.steps and not _sweep(backend, dims, dtypes, options):
        return 1
    print(f"hypothesis: {options.examples} schedules, {options.cases} cases, seed {options.seed}")
    return 0 if _search(backend, dims, dtypes, options) else 1


def replay(backend: Backend, dims: MlaDims, dtype: str, path: Path) -> bool:
    """Ask for the case or the schedule of a file again; print and return whether it is right."""
    try:
        if is_case(path):
            case, dtype = load_case(path)
            unmet = backend.capabilities.unmet(
                case.problem(dims, dtype), (), case.required_features
            )
            if unmet:
                print(f"{path.name}: {'; '.join(unmet)}")
                return True
            check_case(backend, case, dims, dtype)
        else:
            TraceTrial(backend, load_scenario(path), dims, dtype).check()
    except Exception as failure:
        print(f"{path.name}: {type(failure).__name__}: {failure}")
        return False
    print(f"{path.name}: right")
    return True


def _sweep(
    backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], options: argparse.Namespace
) -> bool:
    sweep, started = Sweep(), time.monotonic()
    while sweep.schedules < options.schedules or sweep.steps < options.steps:
        sweep.run(backend, dims, dtypes, options.first + sweep.schedules)
    print(sweep.coverage.table())
    for number, message in sweep.failures.items():
        print(f"schedule {number}: {message}")
    print(
        f"{backend.name} in mode {backend.mode}: {sweep.schedules} schedules, {sweep.steps} steps, "
        f"{sweep.tokens} tokens, {len(sweep.coverage.missing)} situations not reached, "
        f"{len(sweep.failures)} failures, {time.monotonic() - started:.0f} s"
    )
    return not sweep.failures


def _search(
    backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], options: argparse.Namespace
) -> bool:
    from paged_mla_conformance.fuzz.machine import search  # noqa: PLC0415 - needs the extra
    from paged_mla_conformance.fuzz.steps import search_cases  # noqa: PLC0415 - likewise

    folder, seed = options.folder, options.seed
    try:
        if options.cases:
            search_cases(backend, dims, dtypes, folder, examples=options.cases, seed=seed)
            print("hypothesis: no failing case")
        if options.examples:
            search(backend, dims, dtypes[0], folder, examples=options.examples, seed=seed)
            print("hypothesis: no failing schedule")
    except Exception as failure:
        print(failure, *getattr(failure, "__notes__", ()), sep="\n")
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
