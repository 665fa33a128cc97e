"""Scenes of a command, each in a process of its own."""

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
    """Return what the command line says, of scenes that there are; its folder is made."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n", maxsplit=1)[0])
    parser.add_argument("scenes", nargs="*", help=", ".join(scenes))
    parser.add_argument("--jobs", type=int, default=jobs, help="scenes at a time")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each prompt")
    parser.add_argument("--seconds", type=float, default=270, help="then what runs is ended")
    parser.add_argument("--folder", type=Path, default=Path(folder))
    parser.add_argument("--out", type=Path, metavar="STEM", help="add to STEM.json and STEM.md")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.scenes = options.scenes or list(scenes)
    if unknown := [name for name in options.scenes if name not in scenes]:
        parser.error(f"{unknown[0]} is none of {', '.join(scenes)}")
    options.folder.mkdir(parents=True, exist_ok=True)
    return options


def run_scenes(module: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run a command's scenes, some at a time; yield what each had found, as they end in turn."""
    deadline = time.monotonic() + options.seconds
    given = ["--here", "--tokens", str(options.tokens)]
    with ThreadPoolExecutor(options.jobs) as pool:
        yield from pool.map(
            lambda name: run_apart(module, name, options.folder, given, deadline), options.scenes
        )


def run_apart(
    module: str, name: str, folder: Path, options: list[str], deadline: float
) -> dict[str, Any]:
    """Run a command's scene; return what it had found as it ended, or what ``error`` ended it.

    Parameters
    ----------
    module : str
        The command: it writes ``FOLDER/NAME.json`` after each of its runs.
    name : str
        Of the scene.
    folder : Path
        What the process says goes to ``NAME.log`` in it.
    options : list of str
    deadline : float
        Of ``time.monotonic``; then the process is ended.
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
            print(f"{name}: ended, out of time")
    if not path.exists():
        return {"error": "out of time" if is_late else reason(log)}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def reason(log: Path) -> str:
    """Return the last line of a log that names an error, or its last line."""
    lines = log.read_text(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return next((line for line in reversed(said) if "Error" in line), (said or ["silence"])[-1])
