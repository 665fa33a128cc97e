"""The command line: what is wrong with it is said before anything runs."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paged_mla_conformance.run.status import USAGE_ERROR
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.documents import one_line
from paged_mla_shared.folders import make_folders
from paged_mla_shared.options import one_of

TEMPLATE = "paged_mla_conformance.template:create"
SUITE = Path(__file__).parents[1] / "suite"
TIME_LIMIT = 600.0

_ABOUT = """\
Runs the suite against a backend and prints the verdict as the last line. The exit status is 0 for
a backend that passed all that it was asked. Options that are not listed here go to pytest.
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
    "changes the suite; allowed: --only, -k, -x": (  # what tests there are, or whether they run
        "-c", "-o", "-n", "--override-ini", "--config-file", "--rootdir", "--confcutdir",
        "--ignore", "--ignore-glob", "--pyargs", "--collect-only", "--collectonly", "--co",
        "--setup-only", "--setuponly", "--setup-plan", "--setupplan", "--assert", "--runxfail",
        "--numprocesses", "--dist", "--mla-",
    ),
    "asks the backend nothing": (
        "-V", "--version", "--markers", "--fixtures", "--funcargs", "--fixtures-per-test",
        "--cache-show",
    ),
    "writes a file of pytest's; allowed: --report": (
        "--log-file", "--debug", "--junitxml", "--junit-xml", "--junitprefix", "--junit-prefix",
    ),
}  # fmt: skip


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong, in one line, with pytest's status for it."""
        self.exit(USAGE_ERROR, f"{self.prog}: {one_line(message)}\n")


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Parameters
    ----------
    backend : str
    report : Path or None
    workers : int
        Processes, at least 1.
    time_limit : float
        Seconds for one test, 0 for none.
    on_screen : bool
        Whether pytest has the terminal.
    dump : Path or None
        Where the step goes at which a test failed.
    pytest_arguments : list of str
        Those of every process, the suite's folder first.
    """

    backend: str
    report: Path | None
    workers: int
    time_limit: float
    on_screen: bool
    dump: Path | None
    pytest_arguments: list[str]


def parse(arguments: list[str] | None) -> Options:
    """Return what the command line asks for.

    Raises
    ------
    SystemExit
        With status 4: something is wrong with it, and one line on stderr says what.
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
        parser.error(f"{on_screen[0]} needs --workers 0: one process has the screen")
    asking = [argument for argument in passed_on if _is_one(argument, _ASKING)]
    if asking and given.timeout is not None:
        parser.error(f"{asking[0]} has no --timeout: somebody sits before it")
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
    """Refuse a run of no backend, and options that choose tests and do not go together."""
    if given.backend is None and not given.quick:
        parser.error("--backend MODULE:FACTORY is missing; allowed without it: --quick")
    if given.quick:
        choosing = [a for a in passed_on if _is_one(a, _CHOOSING)]
        choosing += ["--only"] if given.only is not None else []
        if choosing:
            parser.error(f"--quick chooses tests by itself; allowed without it: {choosing[0]}")
    if given.dump is not None and given.only is None:
        parser.error("--dump needs --only: a dump is of one step")


def _is_one(argument: str, options: tuple[str, ...]) -> bool:
    """Return whether an argument is one of the options, with or without a value."""
    name = argument.partition("=")[0]
    if name.startswith("--mla-"):
        return "--mla-" in options
    return name in options or any(letter in options for letter in _letters(argument))


def _letters(argument: str) -> list[str]:
    """Return the options of one letter that an argument is: -xvs is three, -kxvs is one."""
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
        help="what makes the backend; --quick without it judges the template in NumPy",
    )
    add("--quick", action="store_true", help="run at most 80 tests that find most known faults")
    add(
        "--dims",
        type=one_of(PRESETS),
        metavar="NAME",
        help=f"the model's sizes: {', '.join(PRESETS)} (default: the mode's)",
    )
    add("--dtypes", type=_some, metavar="A,B", help="element types (default: the mode's)")
    add(
        "--profile",
        type=_some,
        metavar="A,B",
        help="terms to speak in: names or TOML files (default: strict)",
    )
    add("--only", type=_some, metavar="ID", help="replay one test or case id")
    add(
        "--dump",
        type=_dump,
        metavar="FILE",
        help="with --only: write the step at which a test failed, for paged-mla explain",
    )
    add(
        "--expected-failures",
        type=_some,
        metavar="TOML",
        help="file of test ids that may fail, each with a reason; one that passes is an error",
    )
    add("--report", type=_report, metavar="JSON", help="writes HTML and JUnit beside it")
    add("--workers", type=_workers, help="processes, or 'auto' (default: 0, one)")
    add(
        "--timeout",
        type=_seconds,
        metavar="SECONDS",
        help=f"for one test (default: {TIME_LIMIT:.0f})",
    )
    return parser


def _some(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("got ''; allowed: anything else")
    return text


def _workers(text: str) -> int:
    if text == "auto":
        return _cores()
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: auto, 0, 1, 2, ...")
    return max(int(text), 1)


def _cores() -> int:
    """Return how many cores this process may use; macOS and Windows know no such limit."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}; allowed: a number > 0")
    return seconds


def _report(text: str) -> Path:
    """Return the path of a report that can be written; what lay there is removed."""
    return _new(text, report_files)


def _dump(text: str) -> Path:
    """Return the path of a dump that can be written; what lay there is removed."""
    return _new(text, lambda path: (path,))


def _new(text: str, files_of: Callable[[Path], tuple[Path, ...]]) -> Path:
    """Return a path whose files can be written; what lay there is removed."""
    path = Path(_some(text))
    try:
        files = files_of(path)
        if len(set(files)) < len(files):
            raise OSError("its HTML or JUnit would lie over it")
        if any(file.exists() and not file.is_file() for file in files):
            raise OSError("something that is no file lies there")
        make_folders(path)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        for file in files:
            file.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"got {text}, which cannot be written: {error}") from error
    return path


def report_files(path: Path) -> tuple[Path, Path, Path]:
    """Return where JSON, HTML and JUnit of a report go."""
    return path, path.with_suffix(".html"), path.with_suffix(".xml")


def _pytest_arguments(given: argparse.Namespace, passed_on: list[str]) -> list[str]:
    command = [
        str(SUITE),
        *("-c", str(SUITE / "pytest.ini")),  # the suite's own strictness, not the caller's
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
