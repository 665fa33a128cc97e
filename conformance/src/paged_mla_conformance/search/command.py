"""``paged-mla fuzz``: search for steps and schedules that a backend fails."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import pytest

from paged_mla_conformance.run.plugin import load_backend
from paged_mla_conformance.search import machine
from paged_mla_conformance.search.corpus import ASKED, check_case, corpus_files, load_replay
from paged_mla_conformance.search.minutes import Search, search_for
from paged_mla_conformance.search.steps import search_cases
from paged_mla_conformance.search.sweep import Sweep
from paged_mla_conformance.suite.selection.adapt_case import adapt_dims
from paged_mla_conformance.suite.selection.core import ALL_DTYPES, CORE
from paged_mla_conformance.suite.selection.params import unmet_by_case, unmet_by_trace
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_shared.backend import Backend
from paged_mla_shared.cases import Case
from paged_mla_shared.dims import PRESETS, MlaDims
from paged_mla_shared.documents import one_line, printable
from paged_mla_shared.errors import InvalidArgument, OutOfMemory
from paged_mla_shared.options import OneLineParser, one_of, refuse_idle, whole

_ABOUT = """\
Searches for steps and schedules that a backend fails: first those that failed before, then numbered
schedules and cases, then those that hypothesis draws. A failing case or schedule is made as small
as possible and written to a replay file.
"""
_EXAMPLE = "example: paged-mla fuzz --backend my_mla:create --minutes 10 --workers 2"
_COUNTS = {
    "schedules": (20, "least number of numbered schedules"),
    "steps": (0, "least number of steps in these schedules"),
    "production": (10, "number of numbered cases of production sizes"),
    "first": (0, "number of the first schedule and case, or of the first round with --minutes"),
    "examples": (50, "number of schedules that hypothesis tries"),
    "cases": (100, "number of cases that hypothesis tries"),
    "seed": (0, "seed of hypothesis"),
}
_IN_VAIN = 100  # schedules that are not supported, after which the sweep gives up
_DRAWN = ("examples", "cases")
_NUMBERED = ("schedules", "steps", "production")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return the exit status.

    It is 0 if no test failed, 1 if a test failed or none of the numbered schedules and cases ran,
    2 for a wrong command line or backend, and 5 if the backend cannot run on this machine. A
    replay file that the backend does not support does not fail, nor does one for which the device
    has too little memory.
    """
    parser = OneLineParser(prog="paged-mla fuzz", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument("--backend", required=True, metavar="MODULE:FACTORY")
    parser.add_argument(
        "--dims",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"model dims: {', '.join(PRESETS)} (default: those of the backend's mode)",
    )
    parser.add_argument("--replay", type=Path, metavar="JSON", help="run only this replay file")
    search = parser.add_argument_group("search (without --replay)")
    for name, (default, about) in _COUNTS.items():
        text = f"{about} (default: {default})"
        search.add_argument(f"--{name}", type=whole(0), metavar="N", help=text)
    search.add_argument(
        "--minutes", type=float, metavar="M", help="repeat the search with new seeds for M minutes"
    )
    search.add_argument("--workers", type=whole(1), metavar="N", help="processes for --minutes")
    search.add_argument("--skip-corpus", action="store_true", help="do not run past failures first")
    search.add_argument(
        "--folder", type=Path, help="folder for replay files (default: the current folder)"
    )
    options = parser.parse_args(arguments)
    try:
        loaded = None if options.replay is None else load_replay(options.replay)
        _refuse_idle(options)
        backend = load_backend(options.backend)
        dtypes = _dtypes(options.backend, backend)
    except (InvalidArgument, pytest.UsageError) as error:
        print(f"paged-mla fuzz: {one_line(error)}", file=sys.stderr)
        return 2
    except pytest.exit.Exception as ended:
        print(printable(ended), file=sys.stderr)
        return int(ended.returncode or 0)
    return 0 if _is_right(backend, dtypes, options, loaded) else 1


def _dtypes(name: str, backend: Backend) -> tuple[str, ...]:
    """Return the dtypes that the backend declares.

    Raises
    ------
    InvalidArgument
        The backend declares no dtype.
    """
    declared = backend.capabilities.dtypes
    if not declared:
        where, allowed = f"--backend {name}: capabilities.dtypes", ", ".join(ALL_DTYPES)
        raise InvalidArgument(where, "no dtype", f"one or more of {allowed}")
    return tuple(dtype for dtype in ALL_DTYPES if dtype in declared)


def _is_right(
    backend: Backend,
    dtypes: tuple[str, ...],
    options: argparse.Namespace,
    loaded: tuple[Case, str] | Scenario | None,
) -> bool:
    """Run a replay file, or search; return whether no test failed and the search ran a test."""
    dims_name = options.dims or CORE[backend.mode].dims
    dims = adapt_dims(PRESETS[dims_name], backend.capabilities)
    if loaded is not None:
        return ask(backend, dims, dtypes[0], options.replay.name, loaded)
    if not options.skip_corpus:
        right = [replay(backend, dims, dtypes[0], path) for path in corpus_files()]
        if not all(right):
            return False
    if options.minutes is not None:
        search_of = Search(options.backend, dims_name, dtypes, options.folder)
        started = time.monotonic()
        found = search_for(search_of, options.minutes, options.workers or 1, options.first)
        return _said(found, backend, started)
    if any(getattr(options, name) for name in _NUMBERED) and not _sweep(
        backend, dims, dtypes, options
    ):
        return False
    print(f"hypothesis: {options.examples} schedules, {options.cases} cases, seed {options.seed}")
    return _search(backend, dims, dtypes, options)


def _refuse_idle(options: argparse.Namespace) -> None:
    """Refuse options that have no effect, then set the defaults of the other options.

    Raises
    ------
    InvalidArgument
        An option has no effect with the other options, or its value is not allowed.
    """
    if options.replay is not None:
        idle = [*_COUNTS, "skip_corpus", "folder", "minutes", "workers"]
        refuse_idle(options, idle, "a search, without --replay")
    if options.minutes is None:
        refuse_idle(options, ["workers"], "--minutes")
    elif not 0 < options.minutes < float("inf"):
        raise InvalidArgument("--minutes", options.minutes, "a finite number > 0")
    else:
        idle = [name for name in _COUNTS if name != "first"]
        refuse_idle(options, idle, "a search without --minutes")
    given = {name: getattr(options, name) for name in _COUNTS}
    counts = {n: _COUNTS[n][0] if value is None else value for n, value in given.items()}
    if not any(counts[name] for name in _NUMBERED):
        refuse_idle(options, ["first"], "--schedules, --steps or --production above 0")
    if not any(counts[name] for name in _DRAWN):
        refuse_idle(options, ["seed"], "--examples or --cases above 0")
    if not any(counts[name] for name in (*_DRAWN, "production")):
        refuse_idle(options, ["folder"], "--examples, --cases or --production above 0")
    if options.skip_corpus and not any(counts[n] for n in (*_NUMBERED, *_DRAWN)):
        raise InvalidArgument("--skip-corpus", "no schedules, examples or cases", "one or more")
    folder = options.folder or Path()
    if not folder.is_dir():
        raise InvalidArgument("--folder", folder, "an existing folder")
    vars(options).update(counts, folder=folder)


def replay(backend: Backend, dims: MlaDims, dtype: str, path: Path) -> bool:
    """Run the case or the schedule of a replay file as :func:`ask` does."""
    return ask(backend, dims, dtype, path.name, load_replay(path))


def ask(
    backend: Backend, dims: MlaDims, dtype: str, name: str, loaded: tuple[Case, str] | Scenario
) -> bool:
    """Run a case or a schedule; print its result and return whether it did not fail."""
    capabilities = backend.capabilities
    if isinstance(loaded, Scenario):
        unmet = unmet_by_trace(capabilities, loaded, dims, dtype)
    else:
        case, dtype = loaded
        unmet = unmet_by_case(capabilities, case, dims, dtype, ASKED)
    if unmet:
        print(one_line(f"{name}: not supported: {'; '.join(unmet)}"))
        return True
    try:
        if isinstance(loaded, Scenario):
            TraceTrial(backend, loaded, dims, dtype).check()
        else:
            check_case(backend, case, dims, dtype)
    except OutOfMemory:
        print(one_line(f"{name}: skipped: the device has too little memory"))
        return True
    except Exception as failure:
        print(printable(f"{name}: failed: {type(failure).__name__}: {failure}"))
        return False
    print(one_line(f"{name}: passed"))
    return True


def _sweep(
    backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], options: argparse.Namespace
) -> bool:
    sweep, started, tried = Sweep(), time.monotonic(), 0
    while tried < options.schedules or _wants_steps(sweep, options.steps, tried):
        sweep.run(backend, dims, dtypes, options.first + tried)
        tried += 1
    for number in range(options.first, options.first + options.production):
        sweep.run_case(backend, dims, dtypes, number, options.folder)
    return _said(sweep, backend, started)


def _wants_steps(sweep: Sweep, steps: int, tried: int) -> bool:
    """Return whether more steps are needed; not if no schedule is supported."""
    return sweep.steps < steps and bool(sweep.schedules or tried < _IN_VAIN)


def _said(sweep: Sweep, backend: Backend, started: float) -> bool:
    """Print the result of a sweep; return whether something ran and nothing failed."""
    print(sweep.table())
    for name, message in sweep.failures.items():
        print(printable(f"{name}: {message}"))
    seconds = time.monotonic() - started
    print(f"{backend.name} in mode {backend.mode}: {sweep.summary()}, {seconds:.0f} s")
    return bool(sweep.schedules or sweep.cases) and not sweep.failures


def _search(
    backend: Backend, dims: MlaDims, dtypes: tuple[str, ...], options: argparse.Namespace
) -> bool:
    folder, seed = options.folder, options.seed
    try:
        if options.cases:
            search_cases(backend, dims, dtypes, folder, examples=options.cases, seed=seed)
            print("hypothesis: no failing case")
        if options.examples:
            machine.search(backend, dims, dtypes[0], folder, examples=options.examples, seed=seed)
            print("hypothesis: no failing schedule")
    except Exception as failure:
        print(*map(printable, (failure, *getattr(failure, "__notes__", ()))), sep="\n")
        return False
    return True
