"""``paged-mla fuzz``: search for steps and schedules that break a backend."""

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
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.options import OneLineParser, one_of, refuse_idle, whole

_ABOUT = """\
Searches for steps and schedules that a backend answers wrongly: first the failures that were found
before, then numbered schedules and steps, then those that hypothesis draws. A failure is written to
a replay file, made as small as possible.
"""
_EXAMPLE = "example: paged-mla fuzz --backend my_mla:create --minutes 10 --workers 2"
_COUNTS = {
    "schedules": (20, "numbered schedules, at least"),
    "steps": (0, "steps of them, at least"),
    "production": (10, "numbered cases of production's sizes"),
    "first": (0, "number of the first ones"),
    "examples": (50, "schedules that hypothesis tries"),
    "cases": (100, "steps that hypothesis tries"),
    "seed": (0, "of hypothesis"),
}
_IN_VAIN = 100  # schedules that are not declared, before there is none that is
_DRAWN = ("examples", "cases")
_NUMBERED = ("schedules", "steps", "production")


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked; return 0 when every answer was right."""
    parser = OneLineParser(prog="paged-mla fuzz", description=_ABOUT, epilog=_EXAMPLE)
    parser.add_argument("--backend", required=True, metavar="MODULE:FACTORY")
    parser.add_argument(
        "--dims",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"model dims: {', '.join(PRESETS)} (default: the mode's)",
    )
    parser.add_argument("--replay", type=Path, metavar="JSON", help="run one replay file instead")
    search = parser.add_argument_group("search (without --replay)")
    for name, (default, about) in _COUNTS.items():
        text = f"{about} (default: {default})"
        search.add_argument(f"--{name}", type=whole(0), metavar="N", help=text)
    search.add_argument(
        "--minutes", type=float, metavar="M", help="all of it, again and again, for so long"
    )
    search.add_argument("--workers", type=whole(1), metavar="N", help="processes of --minutes")
    search.add_argument("--skip-corpus", action="store_true", help="do not ask past failures first")
    search.add_argument("--folder", type=Path, help="where a replay file goes (default: here)")
    options = parser.parse_args(arguments)
    try:
        loaded = None if options.replay is None else load_replay(options.replay)
        _refuse_idle(options)
        backend = load_backend(options.backend)
    except (InvalidArgument, pytest.UsageError) as error:
        print(f"paged-mla fuzz: {one_line(error)}", file=sys.stderr)
        return 2
    except pytest.exit.Exception as ended:
        print(printable(ended), file=sys.stderr)
        return int(ended.returncode or 0)
    return 0 if _is_right(backend, options, loaded) else 1


def _is_right(
    backend: Backend, options: argparse.Namespace, loaded: tuple[Case, str] | Scenario | None
) -> bool:
    """Ask a replay file's, or search; return whether every answer was right."""
    dims_name = options.dims or CORE[backend.mode].dims
    dims = adapt_dims(PRESETS[dims_name], backend.capabilities)
    dtypes = tuple(dtype for dtype in ALL_DTYPES if dtype in backend.capabilities.dtypes)
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
    """Refuse options without effect, then fill in the defaults of the others.

    Raises
    ------
    InvalidArgument
    """
    if options.replay is not None:
        idle = [*_COUNTS, "skip_corpus", "folder", "minutes", "workers"]
        refuse_idle(options, idle, "a search, without --replay")
    if options.minutes is None:
        refuse_idle(options, ["workers"], "--minutes")
    elif not 0 < options.minutes < float("inf"):
        raise InvalidArgument("--minutes", options.minutes, "> 0")
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
    capabilities = backend.capabilities
    if isinstance(loaded, Scenario):
        unmet = unmet_by_trace(capabilities, loaded, dims, dtype)
    else:
        case, dtype = loaded
        unmet = unmet_by_case(capabilities, case, dims, dtype, ASKED)
    if unmet:
        print(one_line(f"{name}: {'; '.join(unmet)}"))
        return True
    try:
        if isinstance(loaded, Scenario):
            TraceTrial(backend, loaded, dims, dtype).check()
        else:
            check_case(backend, case, dims, dtype)
    except Exception as failure:
        print(printable(f"{name}: {type(failure).__name__}: {failure}"))
        return False
    print(one_line(f"{name}: right"))
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
    """Return whether to go on for more steps: not where no schedule is ever declared."""
    return sweep.steps < steps and bool(sweep.schedules or tried < _IN_VAIN)


def _said(sweep: Sweep, backend: Backend, started: float) -> bool:
    """Print what a sweep found; return whether something was asked, and nothing failed."""
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
