"""Time several engines that run at the same time, with interleaved turns."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol


@dataclass(frozen=True)
class Cell:
    """A load: a number of rows, each with the same context length."""

    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.context}"


class Timer(Protocol):
    """A running engine that can time its steps."""

    def seconds(self, cell: Cell) -> float:
        """Return the expected seconds of a cell; infinity if the cell does not fit the cache."""

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of a step in each of `repeats` windows of the same requests."""

    def busy_ms(self, cell: Cell) -> float:
        """Return the milliseconds of a step in which the GPU is busy, by a profiler.

        An engine may be slower after it has been profiled, so callers time all cells first.
        """


class Cells(Protocol):
    """The measurements of one backend."""

    def say_made(self) -> None:
        """Print how long the creation of the engine took."""

    def time_cell(self, timer: Timer, cell: Cell) -> None:
        """Time one cell if there are memory and time for it."""

    def profile(self, timer: Timer) -> None:
        """Profile the timed cells."""


@dataclass
class Together:
    """Engines of several backends on one machine.

    Parameters
    ----------
    make : callable
        Creates an engine of a backend, passes its timer to a callback, and ends the engine.
    timed : dict of str to Cells
        The measurements of each backend.
    cells : list of Cell
    rounds : int
        The number of turns of each backend in a cell.
    """

    make: Callable[[str, Callable[[Timer], None]], None]
    timed: dict[str, Cells]
    cells: list[Cell]
    rounds: int
    alive: dict[str, Timer] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Create an engine of each backend, time all cells, profile them, and end the engines."""
        self._open(list(self.timed))

    def _open(self, left: list[str]) -> None:
        """Create engines of the remaining backends, each inside the callback of the previous."""
        if not left:
            self._time()
            return
        backend, *others = left
        is_made = False

        def use(timer: Timer) -> None:
            nonlocal is_made
            is_made = True
            self.alive[backend] = timer
            self.timed[backend].say_made()
            self._open(others)

        try:
            self.make(backend, use)
        except Exception:  # engines raise any exception, and the other backends are still timed
            tell_error(backend)
        if not is_made:
            self._open(others)

    def _time(self) -> None:
        """Time each cell with all engines, round by round, so that a slow host affects them all."""
        for cell in self.cells:
            for first in range(self.rounds):
                for backend in rotated(list(self.alive), first):
                    self._try(backend, partial(self.timed[backend].time_cell, cell=cell))
        for backend in list(self.alive):
            self._try(backend, self.timed[backend].profile)

    def _try(self, backend: str, act: Callable[[Timer], None]) -> None:
        """Call `act` with the timer of an engine; remove the engine if that raises an error."""
        try:
            act(self.alive[backend])
        except Exception:  # engines raise any exception, and the other backends are still timed
            tell_error(backend)
            del self.alive[backend]


def rotated(names: list[str], first: int) -> list[str]:
    """Return the names rotated by `first`, so that the order differs from round to round."""
    first %= max(len(names), 1)
    return names[first:] + names[:first]


def tell_error(backend: str) -> None:
    """Print the end of the current exception's traceback."""
    print(f"{backend}: {traceback.format_exc()[-900:]}", flush=True)
