"""One worker process as the parent sees it: its messages, its current test, and its end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from typing import Any

from paged_mla_conformance.run.workers import child_process

_CHILD = "paged_mla_conformance.run.workers.child"
_LINES = 40  # of what a process said last
_OTHER_THREAD = re.compile(r"^Thread 0x.*\n(?:  .*\n)*", re.MULTILINE)
_NOT_OURS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE")  # they would change the suite


def ignored_variables() -> list[str]:
    """Return what is set in the environment and does not reach the suite."""
    return [name for name in _NOT_OURS if os.environ.get(name)]


def threads_of_each(workers: int) -> int:
    """Return how many threads one of so many processes may use."""
    return max(1, (os.cpu_count() or 1) // workers)


class Worker:
    """A process that runs tests, with all that it starts in a session of its own.

    Parameters
    ----------
    arguments : sequence of str
        Pytest's.
    on_screen : bool
        Whether pytest has the terminal; else what the process says is kept for messages.
    threads : int
        Of NumPy's and PyTorch's, unless ``OMP_NUM_THREADS`` is set: processes that all take one
        for each processor keep each other from working.
    environment : mapping of str to str, optional
        Variables of the process, in addition to those of this process.

    Attributes
    ----------
    test : int or None
        Number of the test in hand.
    since : float
        When it was handed out, or the process was started (monotonic seconds).
    collected, dismissed : bool
        Whether it has said what there is to ask; whether it was told that nothing is left.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        on_screen: bool,
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.connection, theirs = Pipe()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as this
        self._mark = 0
        variables = {k: v for k, v in os.environ.items() if k not in _NOT_OURS}
        variables |= environment or {}
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins are none of the suite's
        variables.setdefault("OMP_NUM_THREADS", str(threads))
        said = None if on_screen else self._said
        self._process = child_process.start(_CHILD, arguments, theirs, variables, said)
        self.test: int | None = None
        self.since = time.monotonic()
        self.collected = self.dismissed = False

    def ask(self, test: int | None) -> None:
        """Hand out the test of this number, or say that nothing is left."""
        self.test, self.dismissed, self.since = test, test is None, time.monotonic()
        self._mark = self._said.seek(0, os.SEEK_END)
        with suppress(OSError):  # its end is noticed when it does not answer
            self.connection.send_bytes(json.dumps(test).encode())

    def receive(self) -> dict[str, Any]:
        """Return what the process says.

        Raises
        ------
        EOFError, OSError, ValueError
            It is gone, or somebody else spoke in its place.
        """
        message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return message

    @property
    def gone(self) -> bool:
        """Whether the process has ended and said everything it had to."""
        return self._process.poll() is not None and not self.connection.poll()

    def show_where(self) -> None:
        """Let the process say where it is, as far as it still can."""
        child_process.ask_for_stacks(self._process)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)

    def stop(self, patience: float = 0.0) -> str:
        """End the process after some seconds, and what it started; return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        child_process.kill(self._process)
        status = self._process.wait()
        self.connection.close()
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def said(self) -> str:
        """Return the first lines of what the process said since it was last asked.

        Of the stacks of a process only that of the thread which hangs or failed is among them.
        """
        self._said.seek(self._mark)
        said = self._said.read().decode(errors="replace")
        if "\nCurrent thread 0x" in f"\n{said}":  # a thread that is not Python's has no stack
            said = _OTHER_THREAD.sub("", said)
        lines = said.splitlines()
        return "\n".join(line for line in lines[:_LINES] if line.strip(" .FsxEX"))
