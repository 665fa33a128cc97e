"""Run the workloads of a command, each in its own process."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any


def options_of(
    doc: str | None, scenes: Collection[str], *, jobs: int, folder: str
) -> argparse.Namespace:
    """Return the options of the command line, and create the folder.

    Parameters
    ----------
    doc : str or None
        The command's docstring, whose first paragraph is the description.
    scenes : collection of str
        The names of the workloads.
    jobs : int
        The default number of processes.
    folder : str
        The default folder.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("scenes", nargs="*", help=", ".join(scenes))
    parser.add_argument("--jobs", type=int, default=jobs, help="number of parallel workloads")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate per prompt")
    parser.add_argument("--seconds", type=float, default=270, help="time limit of the command")
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--out", type=Path, metavar="STEM", help="add to STEM.json and STEM.md")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scenes = options.scenes or list(scenes)
    if unknown := [name for name in options.scenes if name not in scenes]:
        parser.error(f"unknown workload {unknown[0]}; use one of {', '.join(scenes)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def run_scenes(module: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a command's workloads, some in parallel; yield the result of each in their order."""
    deadline = time.monotonic() + options.seconds
    given = ["--here", "--tokens", str(options.tokens)]
    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(
            lambda name: run_apart(module, name, options.folder, given, deadline), options.scenes
        )


def run_apart(
    module: str, name: str, folder: Path, options: list[str], deadline: float
) -> dict[str, Any]:
    """Run one workload in a process; return its last result, or an ``error`` if it has none.

    Parameters
    ----------
    module : str
        The command, which writes ``FOLDER/NAME.json`` after each of its runs.
    name : str
        The name of the workload.
    folder : Path
        The output of the process is written to ``FOLDER/NAME.log``.
    options : list of str
        Further arguments of the command.
    deadline : float
        The value of ``time.monotonic`` at which the process is killed.
    """
    path, log = folder / f"{name}.json", folder / f"{name}.log"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, name, "--folder", str(folder), *options]
    left = max(deadline - time.monotonic(), 1)
    is_late = False
    with log.open("w") as said:
        try:
            subprocess.run(command, stdout=said, stderr=said, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            is_late = True
            print(f"{name}: stopped, out of time")
    if not path.exists():
        return {"error": "out of time" if is_late else reason(log)}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def reason(log: Path) -> str:
    """Return the last line of a log that contains "Error", or the last line that is not empty."""
    lines = log.read_text(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return next((line for line in reversed(said) if "Error" in line), (said or ["no output"])[-1])
