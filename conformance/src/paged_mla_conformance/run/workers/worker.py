"""A worker process in the parent: its messages, its current test and its end."""

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
_LINES = 40  # lines of the output of a process in a message
_OTHER_THREAD = re.compile(r"^Thread 0x.*\n(?:  .*\n)*", re.MULTILINE)
_NOT_OURS = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONOPTIMIZE")  # these would change the suite


def ignored_variables() -> list[str]:
    """Return the environment variables that are set and that the suite ignores."""
    return [name for name in _NOT_OURS if os.environ.get(name)]


def threads_of_each(workers: int) -> int:
    """Return how many threads each of `workers` processes may use, at least 1."""
    return max(1, (os.cpu_count() or 1) // workers)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return f"signal {number}"


class Worker:
    """A process that runs tests, in a session of its own with the processes that it starts.

    Parameters
    ----------
    arguments : sequence of str
        Arguments for pytest.
    on_screen : bool
        Whether pytest uses the terminal directly; else the output of the process is kept for
        messages.
    threads : int
        The number of threads for NumPy and PyTorch, unless ``OMP_NUM_THREADS`` is set. If every
        process used one thread for each processor, the processes would slow each other down.
    environment : mapping of str to str, optional
        Variables of the process, in addition to those of this process.

    Attributes
    ----------
    test : int or None
        The number of the current test.
    since : float
        When the current test, or the process, was started (monotonic seconds).
    collected, dismissed : bool
        Whether the process has sent its tests; whether it was notified that no test is left.
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
        variables["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins would change the suite
        variables.setdefault("OMP_NUM_THREADS", str(threads))
        said = None if on_screen else self._said
        self._process = child_process.start(_CHILD, arguments, theirs, variables, said)
        self.test: int | None = None
        self.since = time.monotonic()
        self.collected = self.dismissed = False

    def ask(self, test: int | None) -> None:
        """Send the number of the next test, or ``None`` if no test is left."""
        self.test, self.dismissed, self.since = test, test is None, time.monotonic()
        self._mark = self._said.seek(0, os.SEEK_END)
        with suppress(OSError):  # an ended process is handled when no message arrives
            self.connection.send_bytes(json.dumps(test).encode())

    def receive(self) -> dict[str, Any]:
        """Return the next message of the process.

        Raises
        ------
        EOFError, OSError, ValueError
            The process has ended, or another program wrote to the pipe.
        """
        message: dict[str, Any] = json.loads(self.connection.recv_bytes())
        return message

    @property
    def gone(self) -> bool:
        """Whether the process has ended and all its messages were received."""
        return self._process.poll() is not None and not self.connection.poll()

    def show_where(self) -> None:
        """Make the process print its stacks, if it still can."""
        child_process.ask_for_stacks(self._process)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.5)

    def stop(self, patience: float = 0.0) -> str:
        """Wait `patience` seconds, kill the process and its children, and return how it ended."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(patience)
        child_process.kill(self._process)
        status = self._process.wait()
        self.connection.close()
        if status < 0:
            return f"was killed by {_signal_name(-status)}"
        return f"ended with status {status}"

    def said(self) -> str:
        """Return the first lines of the output of the process since its current test started.

        If the output contains stacks, only the stack of the thread that hangs or failed is kept.
        """
        self._said.seek(self._mark)
        said = self._said.read().decode(errors="replace")
        if "\nCurrent thread 0x" in f"\n{said}":  # absent if the thread is not one of Python
            said = _OTHER_THREAD.sub("", said)
        lines = said.splitlines()
        return "\n".join(line for line in lines[:_LINES] if line.strip(" .FsxEX"))
