"""An engine, timed cell by cell: so many rows of so long a context, for each of its backends."""

from __future__ import annotations

import argparse
import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

from paged_mla_optimized.engines.tools.rates import table
from paged_mla_optimized.engines.tools.side_by_side import (
    Cell,
    Timer,
    Together,
    rotated,
    tell_error,
)

LEAST_STEPS, ENOUGH_SECONDS = 6, 0.4
"""Of a window that is timed: it ends when both are reached, or after a command's most steps."""
PROFILED_STEPS = 16
_PATIENCE = 40.0
"""Seconds that a cell may take beyond what was expected: an engine that died may never answer."""


Run: TypeAlias = Callable[[Path, str, argparse.Namespace, Callable[[Timer], None]], None]
"""Makes an engine of a model and a backend, gives it to a user, and ends it."""


@dataclass(frozen=True)
class Command:
    """What is timed.

    Parameters
    ----------
    engine, tool : str
        Package that is run, and its command: ``engines.ENGINE.tools.TOOL``.
    step : str
        What a time is of, for the table.
    ours : str
        Name of our backend in it.
    peers : tuple of str
        The engine's own.
    rows, contexts : tuple of int
        Of the cells that are timed unless others are asked.
    rounds, repeats : int
        Engines of a backend, and windows of a cell in each. A machine's host may be slower for
        half a minute: rounds, in which backends take turns, tell that from a slower backend. With
        ``--together`` one engine of each lives beside the others, and they take turns in each cell.
    switches : tuple of str
        Environment variables that change what is timed: they are told with the command.
    """

    engine: str
    tool: str
    step: str
    ours: str
    peers: tuple[str, ...]
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    rounds: int
    repeats: int
    switches: tuple[str, ...] = ()

    def main(self, doc: str | None, run: Run) -> int:
        """Time cells, or print those that were timed; return 1 if a backend timed none."""
        options = self._options(doc)
        if options.table:
            for heads in sorted({int(p.name.split("-")[0]) for p in options.folder.glob("*.json")}):
                print(table(options.folder, heads, self.ours, self.step))
            return 0
        model = build_apart(options.folder, options.heads, options.layers)
        facts = record_apart() | {
            "engine": f"{self.engine} {version(self.engine)}",
            "heads": options.heads,
            "layers": options.layers,
            "together": options.together,
            "repeats": options.repeats,
            "command": self._command(),
        }
        # Or a profiler that begins again beside CUDA graphs may crash. Engines inherit it.
        os.environ.setdefault("TEARDOWN_CUPTI", "0")
        timed = {name: _Cells(name, options, facts) for name in options.backends}
        end = time.monotonic() + options.seconds
        if options.together:

            def make(backend: str, use: Callable[[Timer], None]) -> None:
                timed[backend].begin(end, 1, 1)
                run(model, backend, options, use)

            Together(make, dict(timed), cells_of(options), options.rounds).run()
        else:
            rounds = range(options.rounds)
            turns = [name for first in rounds for name in rotated(options.backends, first)]
            for number, backend in enumerate(turns):
                timed[backend].begin(end, len(turns) - number, len(options.backends))
                try:
                    run(model, backend, options, timed[backend].time)
                except Exception:  # the others are timed all the same
                    tell_error(backend)
        return int(not all(one.found["cells"] for one in timed.values()))

    def _options(self, doc: str | None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=(doc or "").split("\n\n", maxsplit=1)[0])
        parser.add_argument("--backends", nargs="+", default=[self.ours, *self.peers])
        parser.add_argument("--heads", type=int, default=16)
        parser.add_argument("--layers", type=int, default=8)
        parser.add_argument("--rows", type=int, nargs="+", default=self.rows)
        parser.add_argument("--contexts", type=int, nargs="+", default=self.contexts)
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument("--repeats", type=int, default=self.repeats, choices=range(1, 5))
        parser.add_argument("--together", action="store_true", help="all engines live at once")
        parser.add_argument("--seconds", type=float, default=240, help="shared by all engines")
        parser.add_argument("--folder", type=Path, default=Path(f"out/{self.engine}-{self.tool}"))
        parser.add_argument("--table", action="store_true", help="print what lies in the folder")
        options = parser.parse_args()
        options.at_once = len(options.backends) if options.together else 1  # engines
        if not options.table:
            options.folder.mkdir(parents=True, exist_ok=True)
        elif not any(options.folder.glob("*.json")):
            parser.error(f"--folder: got {options.folder}; allowed: a folder of timed cells")
        return options

    def _command(self) -> str:
        module = f"paged_mla_optimized.engines.{self.engine}.tools.{self.tool}"
        said = [f"{name}={os.environ[name]}" for name in self.switches if name in os.environ]
        return shlex.join([*said, "python", "-m", module, *sys.argv[1:]])


def asked_apart(code: str) -> str:
    """Return what other Python prints, without the newline: this process is to stay fit for forks.

    vLLM forks none that has met the GPU. Where this one had computed with several threads, they
    would not be in the fork, and the engine's core would wait for them forever.
    """
    return subprocess.check_output([sys.executable, "-c", code], text=True).rstrip("\n")


def record_apart() -> dict[str, str]:
    """Return ``device_record()``."""
    module = "paged_mla_optimized.runtime.device"
    asked = f"import json; from {module} import device_record; print(json.dumps(device_record()))"
    found: dict[str, str] = json.loads(asked_apart(asked))
    return found


def build_apart(folder: Path, heads: int, layers: int) -> Path:
    """Return where :func:`~paged_mla_optimized.engines.tools.model.build_model` wrote a model."""
    module = "paged_mla_optimized.engines.tools.model"
    built = f"build_model(Path({str(folder)!r}), heads={heads}, layers={layers})"
    asked = f"from pathlib import Path; from {module} import build_model; print({built})"
    return Path(asked_apart(asked))


@functools.cache
def free_bytes() -> int:
    """Return what the GPU has before any engine."""
    return int(asked_apart("import torch; print(torch.cuda.mem_get_info()[0])"))


def most_cache_bytes(options: argparse.Namespace) -> int:
    """Return what the cache of each engine may take: weights and workspaces need room too."""
    return int(0.6 * free_bytes()) // int(options.at_once)


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise an error in what takes longer, wherever it waits."""

    def end(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Cells:
    """The cells of one backend: ``FOLDER/HEADS-BACKEND.json`` has those timed, or none."""

    def __init__(self, backend: str, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.name, self.options = f"H {options.heads} {backend}", options
        self.start, self.end, self.deadline = 0.0, 0.0, 0.0
        self.turns, self.is_last = 1, False
        self.path = options.folder / f"{options.heads}-{backend}.json"
        self.found: dict[str, Any] = {"facts": facts, "cells": {}}
        self._write()

    def begin(self, end: float, turns: int, backends: int) -> None:
        """Begin to make an engine: it shares the time until `end` with those that follow."""
        self.start, self.end, self.turns = time.monotonic(), end, turns
        self.deadline = end
        self.is_last = turns <= backends  # no engine of this backend follows

    def time(self, timer: Timer) -> None:
        """Time every cell for which there is room and time, beside what earlier rounds found.

        The last engine is then profiled: where a host decides how long a step takes, the GPU alone
        says how fast a backend is.
        """
        made = time.monotonic()
        self.deadline = made + (self.end - made) / self.turns
        self.say_made()
        for cell in cells_of(self.options):
            self.time_cell(timer, cell)
        if self.is_last:
            self.profile(timer)

    def say_made(self) -> None:
        """Say how long it took to make an engine, since it began."""
        print(f"{self.name}: made in {time.monotonic() - self.start:.0f} s", flush=True)

    def time_cell(self, timer: Timer, cell: Cell) -> None:
        """Time one cell, if there is room and time."""
        self._measure(timer, cell, "ms", lambda c: timer.step_ms(c, self.options.repeats))

    def profile(self, timer: Timer) -> None:
        """Profile what was timed, beginning with the cells that have least to compute."""
        timed = [cell for cell in cells_of(self.options) if str(cell) in self.found["cells"]]
        for cell in reversed(timed):
            self._measure(timer, cell, "busy_ms", lambda c: [timer.busy_ms(c)])

    def _measure(
        self, timer: Timer, cell: Cell, what: str, measure: Callable[[Cell], list[float]]
    ) -> None:
        expected, start = timer.seconds(cell), time.monotonic()
        if expected > self.deadline - start:
            print(f"{self.name} {cell} {what}: left out, would take {expected:.0f} s", flush=True)
            return
        with limit(expected + _PATIENCE):
            found = measure(cell)
        took = time.monotonic() - start
        self.found["cells"].setdefault(str(cell), {}).setdefault(what, []).extend(found)
        self._write()
        told = " ".join(f"{ms:.3f}" for ms in found)
        print(
            f"{self.name} {cell} {what}: {told}, in {took:.1f} s, {expected:.1f} expected",
            flush=True,
        )

    def _write(self) -> None:
        self.path.write_text(json.dumps(self.found, indent=1))


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return the cells that are asked: those whose steps are most attention first."""
    found = [Cell(rows, context) for rows in options.rows for context in options.contexts]
    return sorted(found, key=lambda cell: (-cell.rows * cell.context, cell.rows))


def token_bytes(layers: int) -> int:
    """Return what a token takes in a bf16 cache."""
    return layers * 576 * 2
