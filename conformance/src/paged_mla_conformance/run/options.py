"""The command line of ``paged-mla conformance``. Wrong options are reported before a test runs."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paged_mla_conformance.run.status import USAGE_ERROR
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.folders import make_folders
from paged_mla_shared.options import OneLineParser, one_of

TEMPLATE = "paged_mla_conformance.template:create"
SUITE = Path(__file__).parents[1] / "suite"
TIME_LIMIT = 600.0

_ABOUT = """\
Runs the conformance suite on a backend and prints the verdict as the last line. Each test is
passed, failed, skipped (this run excluded it) or not supported (the backend does not declare what
it needs). The exit status is 0 if no test failed and no core capability is missing. Options that
are not listed here are passed to pytest.
"""
_EXAMPLE = """\
example: paged-mla conformance --backend my_mla:create --profile kernel --report out/mla.json
"""
_WITHOUT_VALUE = "xvqslhV"  # options of one letter after which another may follow
_ASKING = ("--pdb", "--trace")
_CHOOSING = ("-k", "-m", "--deselect")
_SCREEN = (
    *_ASKING, "-s", "-v", "--verbose", "--verbosity", "--capture", "--durations", "--durations-min",
    "--setup-show", "--setupshow",
)  # fmt: skip
_REFUSED = {
    "changes the suite; allowed: --only, -k, -x": (  # the set of tests, or whether they run
        "-c", "-o", "-n", "--override-ini", "--config-file", "--rootdir", "--confcutdir",
        "--ignore", "--ignore-glob", "--pyargs", "--collect-only", "--collectonly", "--co",
        "--setup-only", "--setuponly", "--setup-plan", "--setupplan", "--assert", "--runxfail",
        "--numprocesses", "--dist", "--mla-",
    ),
    "runs no test": (
        "-V", "--version", "--markers", "--fixtures", "--funcargs", "--fixtures-per-test",
        "--cache-show",
    ),
    "writes a file of pytest; allowed: --report": (
        "--log-file", "--debug", "--junitxml", "--junit-xml", "--junitprefix", "--junit-prefix",
    ),
}  # fmt: skip


class _Parser(OneLineParser):
    status = USAGE_ERROR


@dataclass(frozen=True)
class Options:
    """The parsed command line.

    Parameters
    ----------
    backend : str
        ``module:factory``, or the path of a TOML file.
    report : Path or None
        The path of the JSON report; the HTML page and the JUnit file are written next to it.
    workers : int
        The number of worker processes, at least 1.
    time_limit : float
        Seconds for one test; 0 means no limit.
    on_screen : bool
        Whether pytest uses the terminal directly.
    dump : Path or None
        The file to which the step of a failed test is written.
    pytest_arguments : list of str
        The arguments of pytest in every worker process; the first is the suite's folder.
    """

    backend: str
    report: Path | None
    workers: int
    time_limit: float
    on_screen: bool
    dump: Path | None
    pytest_arguments: list[str]


def parse(arguments: list[str] | None) -> Options:
    """Return the options of a command line; older reports at the same paths are removed.

    Parameters
    ----------
    arguments : list of str or None
        The arguments without the program's name; ``None`` means ``sys.argv[1:]``.

    Raises
    ------
    SystemExit
        With status 4 if an option is wrong; one line on stderr states the error.
    """
    parser = _parser()
    given, passed_on = parser.parse_known_args(arguments)
    for argument in passed_on:
        for why, options in _REFUSED.items():
            if _is_one(argument, options):
                parser.error(f"got {argument}, which {why}")
    _check_choice(parser, given, passed_on)
    if given.backend is None:
        given.backend = TEMPLATE
        given.workers = given.workers or _workers("auto")
    on_screen = [argument for argument in passed_on if _is_one(argument, _SCREEN)]
    workers = given.workers or 1
    if on_screen and workers > 1:
        parser.error(f"{on_screen[0]} needs --workers 0, because one process uses the terminal")
    asking = [argument for argument in passed_on if _is_one(argument, _ASKING)]
    if asking and given.timeout is not None:
        parser.error(f"{asking[0]} waits for input and cannot be used with --timeout")
    return Options(
        backend=given.backend,
        report=given.report,
        workers=workers,
        time_limit=0.0 if asking else given.timeout or TIME_LIMIT,
        on_screen=bool(on_screen),
        dump=given.dump,
        pytest_arguments=_pytest_arguments(given, passed_on),
    )


def _check_choice(
    parser: argparse.ArgumentParser, given: argparse.Namespace, passed_on: list[str]
) -> None:
    """Exit with an error if there is no backend, or if options exclude each other."""
    if given.backend is None and not given.quick:
        parser.error("--backend MODULE:FACTORY is missing; only --quick works without it")
    if given.quick:
        choosing = [a for a in passed_on if _is_one(a, _CHOOSING)]
        choosing += ["--only"] if given.only is not None else []
        if choosing:
            parser.error(f"--quick chooses the tests; it cannot be used with {choosing[0]}")
    if given.dump is not None and given.only is None:
        parser.error("--dump needs --only, because a dump contains one step")


def _is_one(argument: str, options: tuple[str, ...]) -> bool:
    """Return whether an argument is one of the options, with or without ``=VALUE``."""
    name = argument.partition("=")[0]
    if name.startswith("--mla-"):
        return "--mla-" in options
    return name in options or any(letter in options for letter in _letters(argument))


def _letters(argument: str) -> list[str]:
    """Return the one-letter options in an argument: -xvs has three, -kxvs has one with a value."""
    letters = "" if argument.startswith("--") or argument[:1] != "-" else argument[1:]
    valued = len(letters) - len(letters.lstrip(_WITHOUT_VALUE))
    return [f"-{letter}" for letter in letters[: valued + 1]]


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="paged-mla conformance",
        description=_ABOUT,
        epilog=_EXAMPLE,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add(
        "--backend",
        type=_some,
        metavar="MODULE:FACTORY",
        help="makes the backend to test; --quick without it tests the NumPy template",
    )
    add("--quick", action="store_true", help="run at most 80 tests that find most known faults")
    add(
        "--dims",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"model sizes: {', '.join(PRESETS)} (default: those of the backend's mode)",
    )
    add(
        "--dtypes",
        type=_some,
        metavar="A,B",
        help="element types (default: those of the backend's mode)",
    )
    add(
        "--profile",
        type=_some,
        metavar="A,B",
        help="conventions of the backend: names of profiles or TOML files (default: strict)",
    )
    add("--only", type=_some, metavar="ID", help="run one test, by its id or the id of its case")
    add(
        "--dump",
        type=_dump,
        metavar="FILE",
        help="with --only: if the test fails, write its last step for paged-mla explain",
    )
    add(
        "--expected-failures",
        type=_some,
        metavar="TOML",
        help="file of test ids that must fail, each with a reason; if one passes, the run fails",
    )
    add(
        "--report",
        type=_report,
        metavar="JSON",
        help="write a report to this file, and an HTML page and a JUnit file next to it",
    )
    add(
        "--workers",
        type=_workers,
        help="number of processes, or 'auto' for one per processor (default: 0, which means one)",
    )
    add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help=f"time limit of one test (default: {TIME_LIMIT:.0f})",
    )
    return parser


def _some(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got ''; allowed: a text that is not empty")
    return text


def _workers(text: str) -> int:
    if text == "auto":
        return _cores()
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: auto, 0, 1, 2, ...")
    return max(int(text), 1)


def _cores() -> int:
    """Return how many cores this process may use; on macOS and Windows, all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a finite number > 0")
    return seconds


def _report(text: str) -> Path:
    """Return the path of a report that can be written; older files of the report are removed."""
    return _new(text, report_files)


def _dump(text: str) -> Path:
    """Return the path of a dump that can be written; an older file is removed."""
    return _new(text, lambda path: (path,))


def _new(text: str, files_of: Callable[[Path], tuple[Path, ...]]) -> Path:
    """Return a path after checking that its files can be written; older files are removed.

    Raises
    ------
    argparse.ArgumentTypeError
        A file cannot be written, or two of the files would have the same path.
    """
    path = Path(_some(text))
    try:
        files = files_of(path)
        if len(set(files)) < len(files):
            raise OSError("the HTML page or the JUnit file would have the same path")
        if any(file.exists() and not file.is_file() for file in files):
            raise OSError("the path exists and is not a regular file")
        make_folders(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        for file in files:
            file.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {text}, which cannot be written: {error}") from error
    return path


def report_files(path: Path) -> tuple[Path, Path, Path]:
    """Return the paths of the JSON report, its HTML page and its JUnit file."""
    return path, path.with_suffix(".html"), path.with_suffix(".xml")


def _pytest_arguments(given: argparse.Namespace, passed_on: list[str]) -> list[str]:
    command = [
        str(SUITE),
        *("-c", str(SUITE / "pytest.ini")),  # the suite's own settings, not those of the caller
        *("-p", "paged_mla_conformance.run.plugin"),
        "--quiet",
        "--tb=short",
    ]
    for option in ("backend", "dims", "dtypes", "profile", "only", "expected_failures", "dump"):
        value = getattr(given, option)
        if value is not None:
            command.append(f"--mla-{option.replace('_', '-')}={value}")
    if given.quick:
        command.append("--mla-quick")
    return command + passed_on
