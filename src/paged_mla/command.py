"""The command ``paged-mla``, which passes each subcommand to the package that implements it."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from paged_mla_shared import __version__
from paged_mla_shared.documents import printable


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, and the module that implements it.

    Parameters
    ----------
    module : str
        A module whose ``main(arguments)`` runs the subcommand and returns the exit status.
    about : str
        A description of the subcommand in one line.
    extra : str
        The extra of the distribution that installs `needs`; "" if the subcommand needs none.
    needs : tuple of str
        The packages that the subcommand imports, by their import names.
    """

    module: str
    about: str
    extra: str = ""
    needs: tuple[str, ...] = ()


_SUITE = ("conformance", ("pytest", "jinja2"))
_SEARCH = ("conformance", ("pytest", "hypothesis"))
_KERNELS = ("optimized", ("torch", "triton"))
SUBCOMMANDS = {
    "conformance": Subcommand(
        "paged_mla_conformance.run.command",
        "test a backend; --quick takes less than a minute",
        *_SUITE,
    ),
    "judge": Subcommand(
        "paged_mla_adapters.judge.command",
        "test a kernel by its signature, without an adapter",
        "conformance,optimized",
        ("pytest", "jinja2", "torch"),
    ),
    "explain": Subcommand(
        "paged_mla_reference.explain.command", "name the rule that a recorded step breaks"
    ),
    "simulate": Subcommand(
        "paged_mla_reference.simulator.command", "run a serving engine's schedule and draw it"
    ),
    "fuzz": Subcommand(
        "paged_mla_conformance.search.command", "search for steps that break a backend", *_SEARCH
    ),
    "export": Subcommand(
        "paged_mla_adapters.flashinfer_bench.command",
        "write cases and kernels for FlashInfer-Bench",
    ),
    "taps": Subcommand(
        "paged_mla_optimized.commands.taps", "record a kernel's intermediate values", *_KERNELS
    ),
    "doctor": Subcommand(
        "paged_mla.doctor", "show what is installed and which kernels serve a step"
    ),
    "warm-up": Subcommand(
        "paged_mla_optimized.commands.warm_up",
        "compile a configuration's kernels into a folder",
        *_KERNELS,
    ),
    "bench": Subcommand(
        "paged_mla_optimized.commands.bench", "time attend in a configuration", *_KERNELS
    ),
}
_EXAMPLE = "paged-mla conformance --quick"
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h; Python's default, 1, means a broken rule here
_STATUSES = """\
Exit statuses:
  0, nothing wrong was found
  1, something wrong was found: a broken rule, a mismatch or a failed test
  2, a wrong command line, a file that cannot be read or written, or a package that is missing
  70, an error of paged-mla itself, with its traceback
  130 and 141, the command was ended by SIGINT or SIGPIPE
conformance and judge also use:
  2, the suite was interrupted, or the backend's module cannot be imported
  4, a wrong command line of the suite
  5, the backend cannot run on this machine"""


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand and return its exit status.

    Parameters
    ----------
    arguments : list of str or None
        The command line; ``None`` uses the arguments of the process.

    Returns
    -------
    int
        0 for success, 2 for an unknown subcommand, a missing package or a full disk,
        ``INTERNAL_ERROR`` for an unexpected exception, 130 after SIGINT or SIGTERM, 141 after a
        reader closed the pipe; otherwise the status that the subcommand returns.
    """
    _replace_unknown_letters()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the suite then writes its report
    given = sys.argv[1:] if arguments is None else arguments
    try:
        status = _run(given)
        if sys.stdout is not None:  # None if the process started with a closed standard output
            sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()
        return 128 + 13  # the status that a shell gives a program which SIGPIPE ended
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + 2  # the status that a shell gives a program which SIGINT ended
    except Exception as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _discard_output()
            print(f"paged-mla: the output cannot be written: {error.strerror}", file=sys.stderr)
            return 2
        print(printable(traceback.format_exc()), end="", file=sys.stderr)
        print("paged-mla: this is an error of paged-mla itself, not a result", file=sys.stderr)
        return INTERNAL_ERROR
    return status


def _run(arguments: list[str]) -> int:
    name, *rest = arguments or ["--help"]
    if name in {"-h", "--help"}:
        print(usage())
        return 0
    if name == "--version":
        print(f"paged-mla {__version__}")
        return 0
    chosen = SUBCOMMANDS.get(name)
    if chosen is None:
        allowed = ", ".join(SUBCOMMANDS)
        print(f"paged-mla: unknown command {name!r}; allowed: {allowed}", file=sys.stderr)
        return 2
    missing = [package for package in chosen.needs if find_spec(package) is None]
    if missing:
        extra = f'pip install "paged-mla[{chosen.extra}]"'
        print(f"paged-mla {name} needs {' and '.join(missing)}: {extra}", file=sys.stderr)
        return 2
    sys.path.insert(0, str(Path.cwd()))  # a backend may be in this folder, as for `python -m`
    status: int = importlib.import_module(chosen.module).main(rest)
    return status


def usage() -> str:
    """Return the help of the command: a line for each subcommand, an example, exit statuses."""
    width = max(map(len, SUBCOMMANDS))
    lines = [f"  {name:{width}}  {sub.about}" for name, sub in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: paged-mla COMMAND [OPTIONS]",
            "",
            *lines,
            "",
            "paged-mla COMMAND --help describes the options of a command.",
            f"Example: {_EXAMPLE}",
            "",
            _STATUSES,
        ]
    )


def _discard_output() -> None:
    """Redirect standard output to the null device, because Python flushes it again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _replace_unknown_letters() -> None:
    """Print characters that the terminal's encoding lacks as escapes instead of raising errors."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
