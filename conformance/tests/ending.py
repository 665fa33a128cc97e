"""Backends that end or block their process at a step with 9 heads."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paged_mla_conformance.meta.mutants.backends import MutantBackend
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_shared.problem import Batch, Output


class _Ending(ForwardingRunner):
    def attend(self, batch: Batch) -> Output:
        """Call `end` if the problem has 9 heads."""
        if self.problem.dims.num_heads == 9:
            self.end()
        return self.inner.attend(batch)

    def end(self) -> None:
        """End or block the process."""


class Exits(_Ending):
    """Exits with status 0."""

    def end(self) -> None:
        """Exit."""
        os._exit(0)


class Segfaults(_Ending):
    """Reads address 0."""

    def end(self) -> None:
        """Read address 0."""
        ctypes.string_at(0)


class IsKilled(_Ending):
    """Sends itself a signal that has no name in Python."""

    def end(self) -> None:
        """Send a real-time signal."""
        os.kill(os.getpid(), signal.SIGRTMIN + 1)


class Hangs(_Ending):
    """Starts a process, writes its id to a file, and waits."""

    def end(self) -> None:
        """Wait 1000 s."""
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        path = Path(os.environ["STARTED"])
        written = path.with_suffix(".written")
        written.write_text(str(started.pid))
        written.rename(path)  # the file never exists without the id
        time.sleep(1000)


def _wait(depth: int) -> None:
    if depth:
        _wait(depth - 1)
    time.sleep(1000)


def _start_threads() -> None:
    """Start threads whose stacks together are longer than a message."""
    for _ in range(8):
        threading.Thread(target=_wait, args=(10,), daemon=True).start()


class SegfaultsBesideThreads(Segfaults):
    """Reads address 0 while other threads wait."""

    def end(self) -> None:
        """Read address 0."""
        _start_threads()
        super().end()


class HangsBesideThreads(_Ending):
    """Waits while other threads wait too."""

    def end(self) -> None:
        """Wait 1000 s."""
        _start_threads()
        time.sleep(1000)


class Forks(_Ending):
    """Forks its process; the fork continues as if it were the only process."""

    def end(self) -> None:
        """Fork."""
        os.fork()


class ExitsOften(ForwardingRunner):
    """Exits in many tests of one group, and runs the others."""

    def attend(self, batch: Batch) -> Output:
        """Exit for numbers of heads that are divisible by 3."""
        if self.problem.dims.num_heads % 3 == 0:
            os._exit(0)
        return self.inner.attend(batch)


class ExitsAlways(ForwardingRunner):
    """Exits in every call."""

    def attend(self, batch: Batch) -> Output:  # noqa: ARG002 - not used
        """Exit."""
        os._exit(0)


def exits_in_the_factory() -> MutantBackend:
    os._exit(0)


def hangs_in_the_factory() -> MutantBackend:
    time.sleep(1000)
    raise AssertionError


def fails_to_load_once() -> MutantBackend:
    """Return a backend that exits at 9 heads; the second process that loads it ends."""
    loads = Path(os.environ["LOADS"])
    loads.write_text(f"{loads.read_text()}1")
    if loads.read_text() == "11":
        os._exit(3)
    return MutantBackend(name="exits", wrap=Exits)


def loads_only_once() -> MutantBackend:
    """Return a backend that exits at 9 heads; only the first process can load it."""
    if Path(os.environ["LOADS"]).read_text():
        raise RuntimeError("no device is left")
    return fails_to_load_once()


_RUNNERS = {
    "exits": Exits,
    "segfaults": Segfaults,
    "is-killed": IsKilled,
    "hangs": Hangs,
    "segfaults-beside-threads": SegfaultsBesideThreads,
    "hangs-beside-threads": HangsBesideThreads,
    "forks": Forks,
    "exits-often": ExitsOften,
    "exits-always": ExitsAlways,
}


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of a backend by its name."""
    if name not in _RUNNERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=_RUNNERS[name])
