"""Run the tests of a changed file in a copy of the sources, in a fork of a preloaded process."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from ci.packages import PACKAGES, ROOT

PRELOADED = ("numpy", "ml_dtypes", "pytest", "hypothesis", "torch", "triton.language")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-p", "_hypothesis_pytestplugin")
LIMIT_BYTES = 16 << 30


def settle(folder: str) -> None:
    """Copy the sources for this process, and import the modules that no change affects."""
    os.nice(10)
    copy = tempfile.mkdtemp(dir=folder)
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (Path(copy) / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, Path(copy) / name)
    os.chdir(copy)
    for package in PACKAGES.values():
        sys.path.insert(0, f"{copy}/{package.source}")
    sys.dont_write_bytecode = True
    os.environ |= {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path[: len(PACKAGES)]),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    for module in PRELOADED:
        importlib.import_module(module)


def fails_a_test(
    file: str, source: str, commands: list[list[str]], limits: list[int]
) -> tuple[bool, list[float]]:
    """Return whether a test fails, hangs or crashes, and the processor time of each command.

    Parameters
    ----------
    file, source : str
        A path in the repository, and the changed contents of the file.
    commands : list of list of str
        Arguments of pytest. The commands run in order until one fails.
    limits : list of int
        The most seconds of processor time of each command.
    """
    path = Path(file)
    kept = path.read_text()
    path.write_text(source)
    failed, seconds = False, []
    try:
        for command, limit in zip(commands, limits, strict=True):
            failed, taken = _run(command, limit)
            seconds.append(taken)
            if failed:
                break
    finally:
        path.write_text(kept)
    return failed, seconds


def _run(command: list[str], limit: int) -> tuple[bool, float]:
    """Run pytest in a fork with limits; return whether it failed, and its processor time."""
    child = os.fork()
    if child == 0:
        _become_pytest(command, limit)
    _, status, usage = os.wait4(child, 0)
    return status != 0, usage.ru_utime + usage.ru_stime


def _become_pytest(command: list[str], limit: int) -> NoReturn:
    """Run pytest in this process with limits, then end the process."""
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        code = int(importlib.import_module("pytest").main([*OPTIONS, *command]))
    finally:
        os._exit(code)
