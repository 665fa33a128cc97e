"""Search for what breaks a backend: the corpus, numbered schedules, then hypothesis."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paged_mla_conformance.fuzz.corpus import check_case, corpus_files, load_replay
from paged_mla_conformance.fuzz.sweep import Sweep
from paged_mla_conformance.plugin import load_backend
from paged_mla_conformance.profile import ALL_DTYPES, CORE
from paged_mla_conformance.traces import TraceTrial
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import PRESETS, MlaDims
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.options import refuse_idle, whole

_COUNTS = {
    "schedules": (20, "numbered schedules, at least"),
    "steps": (0, "steps of them, at least"),
    "first": (0, "number of the first one"),
    "examples": (50, "schedules that hypothesis tries"),
    "cases": (100, "steps that hypothesis tries"),
    "seed": (0, "of hypothesis"),
}
_DRAWN = ("examples", "cases")


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked; return 0 when every answer was right."""
    parser = argparse.ArgumentParser(prog="paged_mla_conformance.fuzz", description=__doc__)
    parser.add_argument("--backend", required=True, metavar="MODULE:FACTORY")
    parser.add_argument("--dims", choices=sorted(PRESETS), help="model dims (default: the mode's)")
    parser.add_argument("--replay", type=Path, metavar="JSON", help="run one replay file instead")
    search = parser.add_argument_group("search (without --replay)")
    for name, (default, about) in _COUNTS.items():
        text = f"{about} (default: {default})"
        search.add_argument(f"--{name}", type=whole(0), metavar="N", help=text)
    search.add_argument("--skip-corpus", action="store_true", help="do not ask past failures first")
    search.add_argument("--folder", type=Path, help="where a replay file goes (default: here)")
    options = parser.parse_args(arguments)
    try:
        loaded = None if options.replay is None else load_replay(options.replay)
        _refuse_idle(options)
    except InvalidArgument as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2
    backend = load_backend(options.backend)
    dims = PRESETS[options.dims or CORE[backend.mode].dims]
    dtypes = tuple(dtype for dtype in ALL_DTYPES if dtype in backend.capabilities.dtypes)
    if loaded is not None:
        return 0 if ask(backend, dims, dtypes[0], options.replay.name, loaded) else 1
    if not options.skip_corpus:
        right = [replay(backend, dims, dtypes[0], path) for path in corpus_files()]
        if not all(right):
            return 1
    if options.schedules + options.steps and not _sweep(backend, dims, dtypes, options):
        return 1
    print(f"hypothesis: {options.examples} schedules, {options.cases} cases, seed {options.seed}")
    return 0 if _search(backend, dims, dtypes, options) else 1


def _refuse_idle(options: argparse.Namespace) -> None:
    """Refuse options without effect, then fill in the defaults of the others.

    Raises
    ------
    InvalidArgument
    """
    if options.replay is not None:
        refuse_idle(options, [*_COUNTS, "skip_corpus", "folder"], "a search, without --replay")
    given = {name: getattr(options, name) for name in _COUNTS}
    counts = {n: _COUNTS[n][0] if value is None else value for n, value in given.items()}
    if not counts["schedules"] + counts["steps"]:
        refuse_idle(options, ["first"], "--schedules or --steps above 0")
    if not any(counts[name] for name in _DRAWN):
        refuse_idle(options, ["seed", "folder"], "--examples or --cases above 0")
    if options.skip_corpus and not any(counts[n] for n in ("schedules", "steps", *_DRAWN)):
        raise InvalidArgument("--skip-corpus", "no schedules, examples or cases", "some of them")
    folder = options.folder or Path()
    if not folder.is_dir():
        raise InvalidArgument("--folder", folder, "a folder that is there")
    vars(options).update(counts, folder=folder)


def replay(backend: Backend, dims: MlaDims, dtype: str, path: Path) -> bool:
    """Ask for the case or the schedule of a file again; print and return whether it is right."""
    return ask(backend, dims, dtype, path.name, load_replay(path))


def ask(
    backend: Backend, dims: MlaDims, dtype: str, name: str, loaded: tuple[Case, str] | Scenario
) -> bool:
    """Ask for a case or a schedule; print and return whether it is right."""
    try:
        if isinstance(loaded, Scenario):
            TraceTrial(backend, loaded, dims, dtype).check()
        else:
            case, dtype = loaded
            unmet = backend.capabilities.unmet(
                case.problem(dims, dtype), (), case.required_features
            )
            if unmet:
                print(f"{name}: {'; '.join(unmet)}")
                return True
            check_case(backend, case, dims, dtype)
    except Exception as failure:
        print(f"{name}: {type(failure).__name__}: {failure}")
        return False
    print(f"{name}: right")
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
