"""The search: draw, count the draws and shrink failing ones until the time is up."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cells import Cells
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

_HANGS = 60 if os.environ.get("TRITON_INTERPRET") == "1" else 300
"""The time limit of a draw in seconds; on a GPU it includes compilation."""
_SHRINKING = 20.0
_FIRST = 2
"""The number of draws for a cell without draws; the first is the simplest draw."""
_DIGITS = re.compile(r"-?\d[\d.e+-]*|\[[^\]]*\]")


class TimeUp(KeyboardInterrupt):
    """The time is up. It is an interrupt because hypothesis does not catch one."""


class Hangs(AssertionError):
    """A draw does not end."""


@dataclass(frozen=True)
class Subject:
    """A public class with its draws and the check of a draw against the contract.

    Parameters
    ----------
    name : str
        Its name in ``--only``.
    reads : mapping
        See :class:`Cells`.
    draws : callable
        Takes a pair of value and kind, and returns a strategy of draws that are wrong in this way.
    hold : callable
        Takes a draw; raises an error if a result is wrong.
    wrong_in : callable
        Takes a draw; returns its pairs of value and kind.
    forget : callable
        Drops instances that a failed draw may have left broken.
    launches : callable or None
        Takes a draw; returns its launches. With ``None`` every draw has all launches.
    examples : int
        The number of draws for a cell at a time.
    """

    name: str
    reads: Mapping[str, Mapping[str, tuple[str, ...]]]
    draws: Callable[[tuple[str, str]], st.SearchStrategy[Any]]
    hold: Callable[[Any], None]
    wrong_in: Callable[[Any], set[tuple[str, str]]]
    forget: Callable[[], None] = lambda: None
    launches: Callable[[Any], Iterable[str]] | None = None
    examples: int = 4

    @property
    def spoilt(self) -> list[tuple[str, str]]:
        """Every pair of value and kind."""
        pairs = {(value, kind) for of in self.reads.values() for value in of for kind in of[value]}
        return sorted(pairs)


@dataclass
class Failure:
    """The smallest draw that fails with one message."""

    subject: str
    message: str
    draw: Any
    count: int = 1


@dataclass
class Search:
    """The state of the search: the counted draws and the failures."""

    until: float
    cells: dict[str, Cells] = field(default_factory=dict)
    failures: dict[str, Failure] = field(default_factory=dict)
    draws: int = 0

    def run(self, subjects: list[Subject], first_seed: int) -> None:
        """Draw for the cell with the fewest draws, until the time is up."""
        self.cells = {subject.name: Cells(subject.reads) for subject in subjects}
        choices = [(subject, pair) for subject in subjects for pair in subject.spoilt]

        def draws_of(choice: tuple[Subject, tuple[str, str]]) -> int:
            subject, pair = choice
            return self.cells[subject.name].of(*pair)

        try:
            for number in itertools.count(first_seed):
                subject, pair = choice = min(choices, key=draws_of)
                count = subject.examples if draws_of(choice) else _FIRST
                self._round(subject, pair, number, count)
        except TimeUp:
            return

    def _round(self, subject: Subject, pair: tuple[str, str], number: int, count: int) -> None:
        """Draw a few times, and shrink the first failure for a limited time."""
        stop = [self.until]

        @seed(number)
        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        )
        @given(subject.draws(pair))
        def ask(draw: Any) -> None:
            if time.monotonic() > stop[0]:
                raise TimeUp
            try:
                self._ask(subject, draw)
            except Exception:
                stop[0] = min(stop[0], time.monotonic() + _SHRINKING)
                raise

        try:
            ask()
        except TimeUp:
            if time.monotonic() > self.until:
                raise
        except Exception:
            pass

    def _ask(self, subject: Subject, draw: Any) -> None:
        """Check one draw; keep it if it is the smallest draw with its failure."""
        self.draws += 1
        launches = subject.reads if subject.launches is None else subject.launches(draw)
        self.cells[subject.name].count(launches, subject.wrong_in(draw))
        try:
            with _alarm(subject.name, draw):
                subject.hold(draw)
        except Exception as error:
            subject.forget()
            message = f"{type(error).__name__}: {error}".strip()
            what = re.split("[,;]", message.splitlines()[0])[0]
            key = f"{subject.name} {_DIGITS.sub('#', what)[:90]}"
            failure = self.failures.get(key)
            if failure is None:
                print(f"{subject.name}: {message.splitlines()[0][:200]}\n  {draw!r}", flush=True)
                self.failures[key] = Failure(subject.name, message, draw)
            else:
                failure.count += 1
                if len(repr(draw)) < len(repr(failure.draw)):
                    failure.message, failure.draw = message, draw
            if _is_of_device(error):  # no kernel runs after an error of the device
                raise TimeUp from None
            raise


def _is_of_device(error: Exception) -> bool:
    return any(word in str(error) for word in ("CUDA error", "[CUDA]", "device-side assert"))


@contextmanager
def _alarm(name: str, draw: Any) -> Iterator[None]:
    """Raise ``Hangs`` inside a draw that takes too long; if a kernel hangs, end the process."""

    def give_up() -> None:
        print(f"{name}: did not end after {2 * _HANGS} s\n  {draw!r}", file=sys.stderr, flush=True)
        os._exit(3)

    def ring(_signal: int, _frame: Any) -> None:
        raise Hangs(f"did not end after {_HANGS} s")

    before = signal.signal(signal.SIGALRM, ring)
    timer = threading.Timer(2 * _HANGS, give_up)
    timer.daemon = True
    timer.start()
    signal.alarm(_HANGS)
    try:
        yield
    finally:
        signal.alarm(0)
        timer.cancel()
        signal.signal(signal.SIGALRM, before)
