"""Engines that live side by side, and are timed in turns."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol


@dataclass(frozen=True)
class Cell:
    """A load."""

    rows: int
    context: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.context}"


class Timer(Protocol):
    """An engine that runs."""

    def seconds(self, cell: Cell) -> float:
        """Return how long a cell should take; infinite where the cache has no room for it."""

    def step_ms(self, cell: Cell, repeats: int) -> list[float]:
        """Return the milliseconds of a step, of so many windows of the same requests."""

    def busy_ms(self, cell: Cell) -> float:
        """Return for how many of a step's milliseconds the GPU is busy, by a profiler.

        An engine may be slower once it has been profiled: all is timed before that.
        """


class Cells(Protocol):
    """What is timed of one backend."""

    def say_made(self) -> None:
        """Say how long it took to make an engine."""

    def time_cell(self, timer: Timer, cell: Cell) -> None:
        """Time one cell, if there is room and time."""

    def profile(self, timer: Timer) -> None:
        """Profile what was timed."""


@dataclass
class Together:
    """Engines of several backends on one machine.

    Parameters
    ----------
    make : callable
        Makes an engine of a backend, gives it to a user, and ends it.
    timed : dict of str to Cells
        Of each backend.
    cells : list of Cell
    rounds : int
        Turns of each backend in a cell.
    """

    make: Callable[[str, Callable[[Timer], None]], None]
    timed: dict[str, Cells]
    cells: list[Cell]
    rounds: int
    alive: dict[str, Timer] = field(default_factory=dict, init=False)

    def run(self) -> None:
        """Make an engine of each backend, time all cells, profile, and end them."""
        self._open(list(self.timed))

    def _open(self, left: list[str]) -> None:
        """Make engines of the backends that are left, one inside the use of another."""
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
        except Exception:  # engines raise what they like, and the others are timed all the same
            tell_error(backend)
        if not is_made:
            self._open(others)

    def _time(self) -> None:
        """Time each cell by all engines, round by round, so that a slow host is slow for all."""
        for cell in self.cells:
            for first in range(self.rounds):
                for backend in rotated(list(self.alive), first):
                    self._try(backend, partial(self.timed[backend].time_cell, cell=cell))
        for backend in list(self.alive):
            self._try(backend, self.timed[backend].profile)

    def _try(self, backend: str, act: Callable[[Timer], None]) -> None:
        """Do something with an engine, or be done with it."""
        try:
            act(self.alive[backend])
        except Exception:  # an engine may fail in any way, and the others are timed all the same
            tell_error(backend)
            del self.alive[backend]


def rotated(names: list[str], first: int) -> list[str]:
    """Return the names from one of them on, round and round: a host grows faster or slower."""
    first %= max(len(names), 1)
    return names[first:] + names[:first]


def tell_error(backend: str) -> None:
    """Print the end of what was raised."""
    print(f"{backend}: {traceback.format_exc()[-900:]}", flush=True)
