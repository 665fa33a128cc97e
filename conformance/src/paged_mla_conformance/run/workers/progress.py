"""Show the progress of a run: a line that changes on a terminal, or a line every 10 s in a log."""

from __future__ import annotations

import time
from typing import TextIO

_EVERY = {True: 0.5, False: 10.0}  # seconds between lines, on a terminal and in a log


class Progress:
    """Writes how many tests are done, how many failed, and an estimate of the remaining time.

    Parameters
    ----------
    stream : TextIO
        The terminal or the log file.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._started = self._last = time.monotonic()

    def begin(self, *lines: str) -> None:
        """Write the lines and start to measure time."""
        self.end()
        for line in lines:
            self._stream.write(f"{line}\n")
        self._stream.flush()
        self._started = self._last = time.monotonic()

    def show(self, done: int, total: int, failed: int, share: float) -> None:
        """Write the progress, unless the last line is recent.

        Parameters
        ----------
        done, total, failed : int
            Numbers of tests. While `total` is 0, the line states that the backend is being
            loaded.
        share : float
            The share of the work that is done, from 0 to 1.
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
        """Clear the line on a terminal."""
        if self._live:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def duration(seconds: float) -> str:
    """Return a duration with its unit: in seconds, or in minutes from 100 s on."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min"
