"""Runs the suite in worker processes, and requires a result for every test."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import wait
from typing import Any
from zlib import crc32

from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.status import BROKEN_BACKEND, NO_TESTS_COLLECTED, USAGE_ERROR
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers.progress import Progress
from paged_mla_conformance.run.workers.worker import Worker, threads_of_each

MOST_REPLACED = 5  # processes, before a backend is given up
_ANSWERS_A_PROCESS = 10  # tests that ran, which allow one process more
_REPEATS_A_PROCESS = 4  # processes lost for a cause that is known, which count as one
_TICK = 0.2  # seconds between two looks at the clock
_PATIENCE = 5.0  # seconds for a process to end by itself
_LOADING = "while the backend was loaded"


class Refused(Exception):
    """Nothing was asked: a wrong command line, no backend, or a machine that cannot run it.

    Parameters
    ----------
    status : int
        Pytest's: 4 for a wrong command line or backend, 5 where it cannot run here, and 2 where its
        module cannot be imported.
    message : str
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class Collected:
    """The first answer of a process: the tests that it collected, and the backend that they judge.

    Parameters
    ----------
    subject : dict
        Fields of :class:`Subject`.
    tests : list of dict
        Fields of a :class:`Result` for each test, without its outcome.
    costs : list of float
        Expected costs of the tests, in any unit.
    huge : list of int
        Numbers of tests that need most of the device's memory.
    deselected : list of str
        Names of tests that are not asked.
    quick : dict or None
        What a quick selection can find, and finds.
    maxfail : int
        Failures after which the run ends; 0 for none.
    warnings : dict of str to int
        Warnings of the collection, and how many of each.
    """

    subject: dict[str, Any]
    tests: list[dict[str, Any]]
    costs: list[float]
    huge: list[int]
    deselected: list[str]
    quick: dict[str, Any] | None
    maxfail: int
    warnings: dict[str, int]


class Scheduler:
    """Hands out the tests one by one.

    A process that ends or takes too long fails the test it had in hand; another one takes its place
    and goes on with the next. A backend is given up where one process after the other is lost and
    no test is answered between, or where many are, for the number of answers. Tests of one group
    that end in one way have one cause, which counts once; its repetitions count little.

    Tests of huge caches all go to one process: side by side on a device, each would take the memory
    that another one found free.

    Parameters
    ----------
    arguments : sequence of str
        Pytest's.
    report : Report
        Gets what is found out.
    progress : Progress
    first : Worker
        A process that has been started with `arguments`; it finds out what there is to ask.
    workers : int
        Processes, at least 1.
    on_screen : bool
        Whether pytest has the terminal.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        report: Report,
        progress: Progress,
        *,
        first: Worker,
        workers: int,
        on_screen: bool,
    ) -> None:
        self._arguments = arguments
        self._report = report
        self._progress = progress
        self._wanted = workers
        self._on_screen = on_screen
        self._workers = [first]
        self._tests: list[Result] = []  # as they stand until they are answered
        self._cost: dict[str, float] = {}  # of each test, as a share of the whole run
        self._share = 0.0  # of the run that is done
        self._queue: deque[int] = deque()
        self._huge: deque[int] = deque()
        self._keeper: Worker | None = None  # of the huge ones
        self._maxfail = 0
        self._lost_in_a_row = 0  # processes, since a test was answered
        self._lost: Counter[tuple[str, str]] = Counter()  # processes, by group and by how
        self._answers = 0  # tests that ran and left their process as it was

    def run(self) -> None:
        """Ask everything.

        Raises
        ------
        Refused
        KeyboardInterrupt
        """
        for _ in range(self._wanted - 1):
            self._start()
        try:
            while self._workers:
                self._listen()
                self._watch()
                results = self._report.results
                failed = sum(result.fails for result in results)
                if not self._on_screen:
                    self._progress.show(len(results), len(self._tests), failed, self._share)
        finally:
            self._progress.end()
            for worker in self._workers:
                worker.stop()

    def _start(self) -> None:
        threads = threads_of_each(self._wanted)
        worker = Worker(self._arguments, on_screen=self._on_screen, threads=threads)
        self._workers.append(worker)

    def _listen(self) -> None:
        """Take what the processes say."""
        ready = wait([worker.connection for worker in self._workers], _TICK)
        for worker in [worker for worker in self._workers if worker.connection in ready]:
            try:
                message = worker.receive()
            except (EOFError, OSError, ValueError):
                self._died(worker)
                continue
            kind = message.pop("kind")
            if kind == "collected":
                self._collected(worker, Collected(**message))
            elif kind == "result":
                self._answered(worker, **message)
            else:
                self._ended(worker, **message)

    def _watch(self) -> None:
        """Notice processes that are gone or take too long."""
        for worker in list(self._workers):
            limit = self._report.time_limit
            if worker.gone:
                self._died(worker)
            elif limit and time.monotonic() - worker.since > limit:
                self._timed_out(worker)

    def _collected(self, worker: Worker, found: Collected) -> None:
        """Learn from the first answer which tests there are; other processes must agree."""
        worker.collected = True
        known = [Result(**test) for test in found.tests]
        if not self._tests:
            report, self._tests, self._maxfail = self._report, known, found.maxfail
            report.subject, report.deselected = Subject(**found.subject), found.deselected
            report.tests = [test.test for test in known]
            if found.quick is not None:
                report.findable, report.finds = found.quick["findable"], found.quick["finds"]
            report.warn(found.warnings, "while it was loaded")
            self._cost = dict(zip(report.tests, _shares(found.costs), strict=True))
            self._huge.extend(found.huge)
            self._queue.extend(_mixed(report.tests, set(range(len(known))) - set(found.huge)))
            self._progress.begin(f"{report.subject.title}: {len(known)} tests")
        elif known != self._tests:
            self._give_up("processes found different tests")
        self._hand_out(worker)

    def _answered(
        self, worker: Worker, *, result: dict[str, Any], warnings: dict[str, int], lost: bool
    ) -> None:
        """Take a result; a process that lost its device is of no further use."""
        found = Result(**result)
        self._report.warn(warnings, found.test)
        self._add(found)
        if lost:
            self._remove(worker)
            self._replace(found.group, "lost its device")
        else:
            if found.outcome != "skipped":
                self._lost_in_a_row = 0
                self._answers += 1
            self._hand_out(worker)

    def _ended(self, worker: Worker, *, status: int) -> None:
        """Let a process go that has nothing left, or whose pytest stopped by itself."""
        self._remove(worker, patience=_PATIENCE)
        said = worker.said()
        if worker.dismissed:
            return
        if not self._tests and status in {
            BROKEN_BACKEND,
            USAGE_ERROR,
            NO_TESTS_COLLECTED,
        }:
            raise Refused(status, _refusal(said))
        stopped = f"pytest stopped with status {status}: {said}".rstrip(": ")
        if worker.collected:
            self._give_up(stopped)
        else:
            self._not_loaded(stopped)

    def _died(self, worker: Worker) -> None:
        how = self._remove(worker, patience=_PATIENCE)
        if worker.test is not None:
            self._fail(worker, "died", f"the process {how} during this test")
        elif not worker.collected:
            self._not_loaded(f"the process {how} {_LOADING}\n{worker.said()}".strip())

    def _timed_out(self, worker: Worker) -> None:
        limit = f"{self._report.time_limit:g} s"
        worker.show_where()
        self._remove(worker)
        if worker.test is not None:
            self._fail(worker, "timed-out", f"no answer after {limit} (--timeout)")
        elif not worker.dismissed:
            self._not_loaded(
                f"the process took more than {limit} {_LOADING}\n{worker.said()}".strip()
            )

    def _not_loaded(self, how: str) -> None:
        """Let another process try, if one could load the backend before: a fault may outlast it."""
        if self._tests:
            self._replace("loading", how)
        else:
            self._give_up(how)

    def _fail(self, worker: Worker, end: str, message: str) -> None:
        """Count the test that a process had in hand as failed, and go on without the process."""
        assert worker.test is not None
        test, took = self._tests[worker.test], time.monotonic() - worker.since
        message = f"{message}\n{worker.said()}".strip()
        self._add(replace(test, end=end, message=message, ms=round(took * 1e3, 3)))
        self._replace(test.group, end)

    def _add(self, result: Result) -> None:
        results = self._report.results
        results.append(result)
        self._share += self._cost[result.test]
        failed = sum(known.fails for known in results)
        if result.fails and failed == self._maxfail and (self._queue or self._huge):
            self._report.stopped = f"stopped after {failed} failures"
            self._drop_the_rest()

    def _hand_out(self, worker: Worker) -> None:
        if self._huge and self._keeper in {None, worker}:
            self._keeper = worker
            worker.ask(self._huge.popleft())
        else:
            worker.ask(self._queue.popleft() if self._queue else None)

    def _remove(self, worker: Worker, patience: float = 0.0) -> str:
        self._workers.remove(worker)
        if worker is self._keeper:
            self._keeper = None
        return worker.stop(patience)

    def _replace(self, group: str, how: str) -> None:
        """Start a process for one that is gone, if there is anything left to ask."""
        if not self._queue and not self._huge:
            return
        self._lost_in_a_row += 1
        self._lost[group, how] += 1
        causes, lost = len(self._lost), self._lost.total()
        weight = causes + (lost - causes) // _REPEATS_A_PROCESS
        allowed = MOST_REPLACED + self._answers // _ANSWERS_A_PROCESS
        if self._lost_in_a_row > MOST_REPLACED or weight > allowed:
            said = f"{lost} processes that ended or hung, for {causes} causes"
            self._give_up(f"gave up after {said}, the last in {group}: {how}")
        else:
            self._start()

    def _give_up(self, reason: str) -> None:
        self._report.errors.append(reason)
        self._drop_the_rest()

    def _drop_the_rest(self) -> None:
        self._queue.clear()
        self._huge.clear()


def _shares(costs: Sequence[float]) -> list[float]:
    total = sum(costs)
    return [cost / total for cost in costs]


def _mixed(tests: Sequence[str], numbers: set[int]) -> list[int]:
    """Return numbers of tests in an order that has long and short ones everywhere.

    The mean of those that are done is then that of the rest. The order depends on names alone, so
    that every run has the same one.
    """
    return sorted(numbers, key=lambda number: (crc32(tests[number].encode()), number))


def _refusal(said: str) -> str:
    """Return pytest's own word on why it did not start, without what stands around it.

    Behind what ended it, a traceback may follow.
    """
    lines = said.splitlines()
    for number, line in reversed([*enumerate(lines)]):
        if line.startswith("Exit: "):
            return "\n".join([line.removeprefix("Exit: "), *lines[number + 1 :]])
        for prefix in ("ERROR: ", "pytest.main(): error: "):
            if line.startswith(prefix):
                return line.removeprefix(prefix)
    return said
