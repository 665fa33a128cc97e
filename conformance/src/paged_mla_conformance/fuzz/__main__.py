"""Search for schedules that break a backend: numbered ones, then hypothesis at the controls."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paged_mla_conformance.fuzz.sweep import Sweep
from paged_mla_conformance.plugin import load_backend
from paged_mla_conformance.profile import ALL_DTYPES, CORE
from paged_mla_conformance.traces import TraceCrash, TraceMismatch, TraceTrial
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
    parser.add_argument("--seed", type=int, default=0, help="of hypothesis")
    parser.add_argument("--replay", type=Path, metavar="JSON", help="run one replay file instead")
    parser.add_argument("--folder", type=Path, default=Path(), help="where a replay file goes")
    options = parser.parse_args(arguments)
    backend = load_backend(options.backend)
    dims = PRESETS[options.dims or CORE[backend.mode].dims]
    dtypes = tuple(dtype for dtype in ALL_DTYPES if dtype in backend.capabilities.dtypes)
    if options.replay:
        return _replay(backend, dims, dtypes[0], options.replay)
    if options.schedules + options.steps and not _sweep(backend, dims, dtypes, options):
        return 1
    return _search(backend, dims, dtypes[0], options) if options.examples else 0


def _replay(backend: Backend, dims: MlaDims, dtype: str, path: Path) -> int:
    trial = TraceTrial(backend, load_scenario(path), dims, dtype)
    try:
        trial.check()
    except (TraceMismatch, TraceCrash) as failure:
        print(failure)
        return 1
    print(f"{path}: {trial.steps} steps, all right")
    return 0


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


def _search(backend: Backend, dims: MlaDims, dtype: str, options: argparse.Namespace) -> int:
    from paged_mla_conformance.fuzz.machine import FAILURES, search  # noqa: PLC0415 - needs the extra

    print(f"hypothesis: {options.examples} schedules, seed {options.seed}")
    try:
        search(backend, dims, dtype, options.folder, examples=options.examples, seed=options.seed)
    except FAILURES as failure:
        print(failure, *getattr(failure, "__notes__", ()), sep="\n")
        return 1
    print("hypothesis: no failing schedule")
    return 0


if __name__ == "__main__":
    sys.exit(main())
