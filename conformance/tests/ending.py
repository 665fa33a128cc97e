"""Backends that end or hold up their process where a step has 9 heads."""

from __future__ import annotations

import ctypes
import os
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
        """End, of 9 heads."""
        if self.problem.dims.num_heads == 9:
            self.end()
        return self.inner.attend(batch)

    def end(self) -> None:
        """Do what the class is named for."""


class Exits(_Ending):
    """It leaves with status 0."""

    def end(self) -> None:
        """Leave."""
        os._exit(0)


class Segfaults(_Ending):
    """It reads address 0."""

    def end(self) -> None:
        """Read."""
        ctypes.string_at(0)


class Hangs(_Ending):
    """It waits for a process that it started, whose id it leaves in a file."""

    def end(self) -> None:
        """Wait for long."""
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
        path = Path(os.environ["STARTED"])
        written = path.with_suffix(".written")
        written.write_text(str(started.pid))
        written.rename(path)  # the file is there with the id, or not at all
        time.sleep(1000)


def _wait(depth: int) -> None:
    if depth:
        _wait(depth - 1)
    time.sleep(1000)


def _start_threads() -> None:
    """Start threads whose stacks are longer, together, than a message."""
    for _ in range(8):
        threading.Thread(target=_wait, args=(10,), daemon=True).start()


class SegfaultsBesideThreads(Segfaults):
    """It reads address 0 while other threads wait."""

    def end(self) -> None:
        """Read."""
        _start_threads()
        super().end()


class HangsBesideThreads(_Ending):
    """It waits while other threads wait too."""

    def end(self) -> None:
        """Wait for long."""
        _start_threads()
        time.sleep(1000)


class Forks(_Ending):
    """It starts a copy of itself, which goes on as if it were the only one."""

    def end(self) -> None:
        """Fork."""
        os.fork()


class ExitsOften(ForwardingRunner):
    """It leaves in many tests of one group, and answers the others."""

    def attend(self, batch: Batch) -> Output:
        """Leave, of some numbers of heads."""
        if self.problem.dims.num_heads % 3 == 0:
            os._exit(0)
        return self.inner.attend(batch)


class ExitsAlways(ForwardingRunner):
    """It never answers."""

    def attend(self, batch: Batch) -> Output:  # noqa: ARG002 - it ends before it looks
        """Leave."""
        os._exit(0)


def exits_in_the_factory() -> MutantBackend:
    os._exit(0)


def hangs_in_the_factory() -> MutantBackend:
    time.sleep(1000)
    raise AssertionError


def fails_to_load_once() -> MutantBackend:
    """Return what exits at 9 heads; the second process that loads it ends while it does."""
    loads = Path(os.environ["LOADS"])
    loads.write_text(f"{loads.read_text()}1")
    if loads.read_text() == "11":
        os._exit(3)
    return MutantBackend(name="exits", wrap=Exits)


def loads_only_once() -> MutantBackend:
    """Return what exits at 9 heads, once."""
    if Path(os.environ["LOADS"]).read_text():
        raise RuntimeError("no device is left")
    return fails_to_load_once()


_RUNNERS = {
    "exits": Exits,
    "segfaults": Segfaults,
    "hangs": Hangs,
    "segfaults-beside-threads": SegfaultsBesideThreads,
    "hangs-beside-threads": HangsBesideThreads,
    "forks": Forks,
    "exits-often": ExitsOften,
    "exits-always": ExitsAlways,
}


def __getattr__(name: str) -> Callable[[], MutantBackend]:
    """Return the factory of one of them."""
    if name not in _RUNNERS:
        raise AttributeError(name)
    return lambda: MutantBackend(name=name, wrap=_RUNNERS[name])
