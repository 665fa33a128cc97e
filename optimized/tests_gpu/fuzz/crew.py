"""Processes that run draws; if a process ends or hangs, the draw that it was running fails."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from asking import Outcome, ask, limit_memory
from combinations import Combination
from drawing import draw

PATIENCE = 240.0  # seconds for one draw, all of whose kernels are compiled
GRACE = 60.0  # seconds for draws in hand when the time is over
_TICK = 1.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A draw to run; parameters are those of :func:`drawing.draw`."""

    combination: Combination
    number: int
    seed: int
    steps: int
    arch: str
    fewer_keys: bool = False

    def run(self) -> Outcome:
        """Draw and run."""
        drawn = draw(
            self.combination,
            seed=self.seed,
            number=self.number,
            steps=self.steps,
            arch=self.arch,
            fewer_keys=self.fewer_keys,
        )
        return ask(drawn)


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    job: Job | None = None
    since: float = 0.0

    def ask(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.connection.send(job)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


class Crew:
    """Hands out jobs to processes, and takes what becomes of them.

    Parameters
    ----------
    workers : int
        Processes, at least 1.
    next_job : callable
        Returns the next job, ``None`` where there is none.
    take : callable
        Gets each job and its outcome.
    """

    def __init__(
        self,
        workers: int,
        next_job: Callable[[], Job | None],
        take: Callable[[Job, Outcome], None],
    ) -> None:
        self._wanted = workers
        self._next_job = next_job
        self._take = take
        self._workers: list[_Worker] = []

    def run(self, seconds: float, tick: Callable[[], None]) -> list[Job]:
        """Run draws for `seconds`; return the draws that were given up since they took too long.

        `tick` is called now and then.
        """
        end = time.monotonic() + seconds
        try:
            while True:
                is_over = time.monotonic() >= end
                while not is_over and len(self._workers) < self._wanted:
                    job = self._next_job()
                    if job is None:
                        is_over = True
                        break
                    self._workers.append(_started())
                    self._workers[-1].ask(job)
                if not self._workers or time.monotonic() > end + GRACE:
                    return [worker.job for worker in self._workers if worker.job]
                self._listen(is_over=is_over)
                tick()
        finally:
            for worker in self._workers:
                worker.stop()

    def _listen(self, *, is_over: bool) -> None:
        ready = wait([worker.connection for worker in self._workers], _TICK)
        for worker in list(self._workers):
            assert worker.job is not None
            if worker.connection in ready:
                self._receive(worker, is_over=is_over)
            elif time.monotonic() - worker.since > PATIENCE:
                self._lose(worker, f"no result after {PATIENCE:g} s")

    def _receive(self, worker: _Worker, *, is_over: bool) -> None:
        assert worker.job is not None
        try:
            outcome: Outcome = worker.connection.recv()
        except (EOFError, OSError):
            worker.process.join()
            self._lose(worker, f"the process ended with status {worker.process.exitcode}")
            return
        self._take(worker.job, outcome)
        job = None if is_over or outcome.is_fatal else self._next_job()
        if job is None:
            self._workers.remove(worker)
            worker.stop()
        else:
            worker.ask(job)

    def _lose(self, worker: _Worker, why: str) -> None:
        assert worker.job is not None
        self._workers.remove(worker)
        worker.stop()
        outcome = Outcome(worker.job.combination, worker.job.number, failure=why)
        self._take(worker.job, outcome)


def _started() -> _Worker:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, mine)


def _work(connection: Connection) -> None:
    """Run draws from the connection until it is closed."""
    limit_memory()
    while True:
        try:
            job: Job = connection.recv()
        except EOFError:
            return
        outcome = job.run()
        connection.send(outcome)
        if outcome.is_fatal:
            return
