"""Time an engine with each of its backends, cell by cell.

A cell is a load: a number of rows and a context length.
"""

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
"""The minimum of a timed window. It ends when both are reached, or at the command's most steps."""
PROFILED_STEPS = 16
_PATIENCE = 40.0
"""Seconds that a cell may take beyond the expected time: an engine that died may hang forever."""


Run: TypeAlias = Callable[[Path, str, argparse.Namespace, Callable[[Timer], None]], None]
"""Creates an engine for a model and a backend, passes its timer to a callback, and ends it."""


@dataclass(frozen=True)
class Command:
    """A command that times an engine.

    Parameters
    ----------
    engine, tool : str
        The package of the engine, and the name of the command: ``engines.ENGINE.tools.TOOL``.
    step : str
        The work that a time is for, in the table.
    ours : str
        The name of this package's backend in the engine.
    peers : tuple of str
        The names of the engine's own backends.
    rows, contexts : tuple of int
        The default cells.
    rounds, repeats : int
        The number of engines for each backend, and the number of windows of a cell in each engine.
        The host may be slower for half a minute. The order of the backends changes from round to
        round, so that a slower host can be distinguished from a slower backend. With
        ``--together`` there is one engine of each backend at the same time, and their turns in each
        cell are interleaved.
    switches : tuple of str
        Environment variables that affect the times. They are recorded with the command.
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
        """Time the cells, or print the table; return 1 if a backend has no times, else 0."""
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
        # A second profiler run with CUDA graphs may crash without this variable, which engines
        # inherit.
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
                except Exception:  # the other backends are still timed
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
        parser.add_argument("--together", action="store_true", help="run all engines at once")
        parser.add_argument("--seconds", type=float, default=240, help="time for all engines")
        parser.add_argument("--folder", type=Path, default=Path(f"out/{self.engine}-{self.tool}"))
        parser.add_argument("--table", action="store_true", help="print the cells in the folder")
        options = parser.parse_args()
        options.at_once = len(options.backends) if options.together else 1  # number of engines
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
    """Run code in another Python process and return its output without the final newline.

    vLLM forks this process for the engine's core, so this process must not use the GPU or compute
    with several threads. A fork has no copy of these threads, and the core would wait for them
    forever.
    """
    return subprocess.check_output([sys.executable, "-c", code], text=True).rstrip("\n")


def record_apart() -> dict[str, str]:
    """Return ``device_record()`` of another process."""
    module = "paged_mla_optimized.runtime.device"
    asked = f"import json; from {module} import device_record; print(json.dumps(device_record()))"
    found: dict[str, str] = json.loads(asked_apart(asked))
    return found


def build_apart(folder: Path, heads: int, layers: int) -> Path:
    """Call :func:`~paged_mla_optimized.engines.tools.model.build_model` in another process."""
    module = "paged_mla_optimized.engines.tools.model"
    built = f"build_model(Path({str(folder)!r}), heads={heads}, layers={layers})"
    asked = f"from pathlib import Path; from {module} import build_model; print({built})"
    return Path(asked_apart(asked))


@functools.cache
def free_bytes() -> int:
    """Return the free bytes of the GPU at the first call, before there is an engine."""
    return int(asked_apart("import torch; print(torch.cuda.mem_get_info()[0])"))


def most_cache_bytes(options: argparse.Namespace) -> int:
    """Return the largest cache of each engine in bytes: 60 % of the free memory, shared equally."""
    return int(0.6 * free_bytes()) // int(options.at_once)


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeoutError`` in the main thread if the context takes longer than `seconds`."""

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
    """The cells of one backend, written to ``FOLDER/HEADS-BACKEND.json`` as they are timed."""

    def __init__(self, backend: str, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.name, self.options = f"H {options.heads} {backend}", options
        self.start, self.end, self.deadline = 0.0, 0.0, 0.0
        self.turns, self.is_last = 1, False
        self.path = options.folder / f"{options.heads}-{backend}.json"
        self.found: dict[str, Any] = {"facts": facts, "cells": {}}
        self._write()

    def begin(self, end: float, turns: int, backends: int) -> None:
        """Start the creation of an engine.

        Parameters
        ----------
        end : float
            The end of the time that this engine and all later engines share.
        turns : int
            The number of these engines.
        backends : int
            The number of backends.
        """
        self.start, self.end, self.turns = time.monotonic(), end, turns
        self.deadline = end
        self.is_last = turns <= backends  # no engine of this backend follows

    def time(self, timer: Timer) -> None:
        """Time every cell for which there are memory and time, and add the times to the file.

        The last engine of the backend is then profiled. If the host limits a step, only the GPU's
        busy time shows how fast the backend is.
        """
        made = time.monotonic()
        self.deadline = made + (self.end - made) / self.turns
        self.say_made()
        for cell in cells_of(self.options):
            self.time_cell(timer, cell)
        if self.is_last:
            self.profile(timer)

    def say_made(self) -> None:
        """Print how long the creation of the engine took."""
        print(f"{self.name}: created in {time.monotonic() - self.start:.0f} s", flush=True)

    def time_cell(self, timer: Timer, cell: Cell) -> None:
        """Time one cell if there are memory and time for it."""
        self._measure(timer, cell, "ms", lambda c: timer.step_ms(c, self.options.repeats))

    def profile(self, timer: Timer) -> None:
        """Profile the timed cells, starting with the cells with the least computation."""
        timed = [cell for cell in cells_of(self.options) if str(cell) in self.found["cells"]]
        for cell in reversed(timed):
            self._measure(timer, cell, "busy_ms", lambda c: [timer.busy_ms(c)])

    def _measure(
        self, timer: Timer, cell: Cell, what: str, measure: Callable[[Cell], list[float]]
    ) -> None:
        expected, start = timer.seconds(cell), time.monotonic()
        if expected > self.deadline - start:
            print(
                f"{self.name} {cell} {what}: skipped, {expected:.0f} s expected "
                "(inf: the cache is too small)",
                flush=True,
            )
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
    """Return the requested cells, starting with the cells whose steps have the most attention."""
    found = [Cell(rows, context) for rows in options.rows for context in options.contexts]
    return sorted(found, key=lambda cell: (-cell.rows * cell.context, cell.rows))


def token_bytes(layers: int) -> int:
    """Return the bytes of a token in a bf16 cache of `layers` layers."""
    return layers * 576 * 2
