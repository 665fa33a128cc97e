"""How far a run is: a line that moves on a terminal, and one now and then in a log."""

from __future__ import annotations

import time
from typing import TextIO

_EVERY = {True: 0.5, False: 10.0}  # seconds between lines, on a terminal and in a log


class Progress:
    """Says how many tests are done, how many failed, and about how long the rest takes.

    Parameters
    ----------
    stream : TextIO
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._started = self._last = time.monotonic()

    def begin(self, *lines: str) -> None:
        """Say what is asked; time counts from here."""
        self.end()
        for line in lines:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._started = self._last = time.monotonic()

    def show(self, done: int, total: int, failed: int, share: float) -> None:
        """Say how far the run is, if it is time to; before `total` is known, that it is loading.

        Parameters
        ----------
        done, total, failed : int
            Tests.
        share : float
            How much of the work is done, from 0 to 1.
        """
        now = time.monotonic()
        if now - self._last < _EVERY[self._live]:
            return
        self._last = now
        spent = now - self._started
        line = f"{duration(spent)}: {done} of {total} done, {failed} failed"
        if not total:
            line = f"{duration(spent)}: loading the backend and collecting tests"
        elif share:
            line += f", about {duration(spent / share * max(0.0, 1 - share))} left"
        self._stream.write(f"\r{line}\x1b[K" if self._live else f"{line}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clear the line."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def duration(seconds: float) -> str:
    """Return seconds as people say them."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
