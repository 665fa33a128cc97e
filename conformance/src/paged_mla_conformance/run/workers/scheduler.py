"""Run the suite in worker processes, and require a result for every test."""

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

MOST_REPLACED = 5  # processes that are replaced before the run gives up
_ANSWERS_A_PROCESS = 10  # for each 10 tests that ran, one more process may be replaced
_REPEATS_A_PROCESS = 4  # this many further losses of known causes count as one
_TICK = 0.2  # longest time in seconds to wait for a message before time limits are checked
_PATIENCE = 5.0  # seconds for a process to end by itself
_LOADING = "while the backend was loaded"


class Refused(Exception):
    """No test ran: the command line is wrong, or the backend cannot be created or run here.

    Parameters
    ----------
    status : int
        Pytest's exit status: 4 for a wrong command line or backend, 5 if the backend cannot run on
        this machine, and 2 if its module, or a module that it imports, fails to import, or if the
        collection of the tests failed or was interrupted.
    message : str
    """

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


@dataclass(frozen=True)
class Collected:
    """The first message of a process: the tests that it collected, and the backend that they test.

    Parameters
    ----------
    subject : dict
        Fields of :class:`Subject`.
    tests : list of dict
        Fields of a :class:`Result` for each test, as before the test runs.
    costs : list of float
        Expected costs of the tests, in any unit.
    huge : list of int
        Numbers of the tests that need most of the device's memory.
    deselected : list of str
        Ids of the tests that the user's selection excludes.
    quick : dict or None
        Fields of a ``Claim`` in a quick run.
    maxfail : int
        The number of failures after which the run ends; 0 means no limit.
    warnings : dict of str to int
        How often each warning appeared during the collection, by its text.
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
    """A scheduler that gives the tests to worker processes, one at a time.

    If a process ends or takes too long, its current test fails, and another process continues with
    the next test. The run gives up if more than five processes in a row are lost without a test
    that ran and kept its process, or if too many are lost for the number of tests that ran. Two
    lost processes have the same cause if their tests are of one group and they ended in the same
    way. Each cause counts once, and every four further losses count as one more.

    All tests with huge caches run in one process. In several processes on one device, each would
    take the memory that another process found free.

    Parameters
    ----------
    arguments : sequence of str
        Arguments for pytest.
    report : Report
        The report to which results, warnings and errors are added.
    progress : Progress
    first : Worker
        A process that has been started with `arguments`.
    workers : int
        The number of processes, at least 1.
    on_screen : bool
        Whether pytest uses the terminal directly.
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
        self._tests: list[Result] = []  # the results before the tests run
        self._cost: dict[str, float] = {}  # of each test, as a share of the cost of the run
        self._share = 0.0  # share of the run that is done
        self._queue: deque[int] = deque()
        self._huge: deque[int] = deque()
        self._keeper: Worker | None = None  # the process that runs the tests with huge caches
        self._maxfail = 0
        self._lost_in_a_row = 0  # processes lost since the last test that ran
        self._lost: Counter[tuple[str, str]] = Counter()  # by the group and the way they ended
        self._answers = 0  # tests that ran and left their process intact

    def run(self) -> None:
        """Run the tests and add their results to the report.

        The function returns if no test is left or the run stops early; all processes are stopped.

        Raises
        ------
        Refused
            pytest collected no test because of the command line or the backend.
        KeyboardInterrupt
            The user interrupts the run.
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
        """Receive messages of the processes."""
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
        """Handle processes that have ended or take too long."""
        for worker in list(self._workers):
            limit = self._report.time_limit
            if worker.gone:
                self._died(worker)
            elif limit and time.monotonic() - worker.since > limit:
                self._timed_out(worker)

    def _collected(self, worker: Worker, found: Collected) -> None:
        """Take the tests from the first process; all other processes must collect the same."""
        worker.collected = True
        known = [Result(**test) for test in found.tests]
        if not self._tests:
            report, self._tests, self._maxfail = self._report, known, found.maxfail
            report.subject, report.deselected = Subject(**found.subject), found.deselected
            report.tests = [test.test for test in known]
            if found.quick is not None:
                report.findable, report.finds = found.quick["findable"], found.quick["finds"]
            report.warn(found.warnings, "while the backend was loaded")
            self._cost = dict(zip(report.tests, _shares(found.costs), strict=True))
            self._huge.extend(found.huge)
            self._queue.extend(_mixed(report.tests, set(range(len(known))) - set(found.huge)))
            self._progress.begin(f"{report.subject.title}: {len(known)} tests")
        elif known != self._tests:
            self._give_up("the worker processes collected different tests")
        self._hand_out(worker)

    def _answered(
        self, worker: Worker, *, result: dict[str, Any], warnings: dict[str, int], lost: bool
    ) -> None:
        """Add a result to the report; replace a process that can no longer use its device."""
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
        """Remove a process whose pytest ended.

        If tests were left, the process is replaced or the run gives up. ``Refused`` is raised if no
        test was collected because of the command line or the backend.
        """
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
        """Record that a process ended; if it was running a test, the test fails."""
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
            self._fail(worker, "timed-out", f"no result after {limit} (--timeout)")
        elif not worker.dismissed:
            self._not_loaded(
                f"the process took more than {limit} {_LOADING}\n{worker.said()}".strip()
            )

    def _not_loaded(self, how: str) -> None:
        """Replace a process that could not load the backend, if another process has loaded it.

        A process may fail to load the backend because another one lost the device. If no process
        has loaded the backend, the run gives up.
        """
        if self._tests:
            self._replace("loading", how)
        else:
            self._give_up(how)

    def _fail(self, worker: Worker, end: str, message: str) -> None:
        """Add a failure of the current test of a process, and replace the process."""
        assert worker.test is not None
        test, took = self._tests[worker.test], time.monotonic() - worker.since
        message = f"{message}\n{worker.said()}".strip()
        if end == "timed-out":
            test = replace(test, replay=f"{test.replay} --timeout {self._report.time_limit:g}")
        self._add(replace(test, end=end, message=message, ms=round(took * 1e3, 3)))
        self._replace(test.group, end)

    def _add(self, result: Result) -> None:
        """Add a result to the report; end the run at the user's limit of failures."""
        results = self._report.results
        results.append(result)
        self._share += self._cost[result.test]
        failed = sum(known.fails for known in results)
        if result.fails and failed == self._maxfail and (self._queue or self._huge):
            many = "1 failure" if failed == 1 else f"{failed} failures"
            self._report.stopped = f"The run stopped after {many} (-x or --maxfail)."
            self._drop_the_rest()

    def _hand_out(self, worker: Worker) -> None:
        if self._huge and self._keeper in {None, worker}:
            self._keeper = worker
            worker.ask(self._huge.popleft())
        else:
            worker.ask(self._queue.popleft() if self._queue else None)

    def _remove(self, worker: Worker, patience: float = 0.0) -> str:
        """Stop a process and forget it; return how it ended, for example "ended with status 1"."""
        self._workers.remove(worker)
        if worker is self._keeper:
            self._keeper = None
        return worker.stop(patience)

    def _replace(self, group: str, how: str) -> None:
        """Start a process for a lost one if tests are left, or give up if too many were lost."""
        if not self._queue and not self._huge:
            return
        self._lost_in_a_row += 1
        self._lost[group, how] += 1
        causes, lost = len(self._lost), self._lost.total()
        weight = causes + (lost - causes) // _REPEATS_A_PROCESS
        allowed = MOST_REPLACED + self._answers // _ANSWERS_A_PROCESS
        if self._lost_in_a_row > MOST_REPLACED or weight > allowed:
            said = f"{lost} processes that ended or hung, with {causes} different causes"
            self._give_up(f"gave up after {said}; the last was in {group}: {how}")
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
    """Return numbers of tests in an order that mixes long and short tests evenly.

    The mean time of the finished tests is then an estimate for the rest. The order depends only on
    the names of the tests, so it is the same in every run.
    """
    return sorted(numbers, key=lambda number: (crc32(tests[number].encode()), number))


def _refusal(said: str) -> str:
    """Return the error with which pytest stopped, from the output of a process.

    A message of ``pytest.exit`` is returned with the traceback after it. If no error is found, the
    whole output is returned.
    """
    lines = said.splitlines()
    for number, line in reversed([*enumerate(lines)]):
        if line.startswith("Exit: "):
            return "\n".join([line.removeprefix("Exit: "), *lines[number + 1 :]])
        for prefix in ("ERROR: ", "pytest.main(): error: "):
            if line.startswith(prefix):
                return line.removeprefix(prefix)
    return said
