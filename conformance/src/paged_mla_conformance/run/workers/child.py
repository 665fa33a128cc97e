"""The worker process: it runs pytest on the suite, one test at a time as the parent requests.

``python -m paged_mla_conformance.run.workers.child NUMBER PYTEST-ARGUMENTS...`` sends JSON through
the pipe with that number. It sends the collected tests once ("collected"), the result of each test
whose number it receives ("result"), and the exit status ("ended") when it receives null or when
pytest stops by itself. If a backend ends this process, no further messages are sent.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Generator
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import pytest

from paged_mla_conformance.run.outcomes import EVERY, WARNED, result_of, unanswered
from paged_mla_conformance.run.quick.collected import QUICK, cost_of
from paged_mla_conformance.run.reports.result import Result
from paged_mla_conformance.run.subject import Subject
from paged_mla_conformance.run.workers import child_process
from paged_mla_conformance.runners.protocol_guard import warning_text
from paged_mla_conformance.suite.selection.items import RUN, is_huge, test_id

_LOST_DEVICE = ("CUDA error", "device-side assert", "illegal memory access")


class Asked:
    """Pytest plugin that runs the tests whose numbers the parent sends.

    Parameters
    ----------
    parent : Connection
        The pipe to the parent process.
    suite : str
        The folder of the suite; pytest must have no other path.
    """

    def __init__(self, parent: Connection, suite: str) -> None:
        self._parent = parent
        self._process = os.getpid()
        self._suite = suite
        self._warned: Counter[str] = Counter()
        self._result: Result | None = None
        self._lost = False

    def send(self, kind: str, **content: Any) -> None:
        """Send a message of a kind to the parent."""
        if os.getpid() != self._process:
            os._exit(1)  # this is a fork that the backend made and that returned to the suite
        self._parent.send_bytes(json.dumps({"kind": kind, **content}).encode())

    def pytest_configure(self, config: pytest.Config) -> None:
        """Refuse paths other than the suite; a selection must use an option that the report shows.

        Raises
        ------
        pytest.UsageError
            The arguments contain another path.
        """
        if config.args != [self._suite]:
            others = " ".join(path for path in config.args if path != self._suite)
            raise pytest.UsageError(f"got {others}; allowed: --only ID, or -k EXPRESSION")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        """Send the collected tests, then run each test that the parent requests."""
        if session.testsfailed or session.config.option.collectonly:
            return None
        items, config = session.items, session.config
        self._warned = config.stash[WARNED]
        chosen = {test_id(item) for item in items}
        self.send(
            "collected",
            subject=asdict(Subject.of(config.stash[RUN])),
            tests=[asdict(unanswered(item)) for item in items],
            costs=[cost_of(item) for item in items],
            huge=[number for number, item in enumerate(items) if is_huge(item)],
            deselected=[test for test in config.stash[EVERY] if test not in chosen],
            quick=asdict(config.stash[QUICK]) if QUICK in config.stash else None,
            maxfail=config.option.maxfail,
            warnings=self._taken(),
        )
        while not self._lost and (number := json.loads(self._parent.recv_bytes())) is not None:
            item, self._result = items[number], None
            config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            result = self._result or unanswered(item)
            self.send("result", result=asdict(result), warnings=self._taken(), lost=self._lost)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Take the result from the report of the call, or from the first report that fails."""
        report = yield
        decides = report.when == "call" or report.outcome != "passed"
        if decides and not (self._result and self._result.fails):
            self._result = result_of(item, report)
        if call.excinfo is not None and any(w in str(call.excinfo.value) for w in _LOST_DEVICE):
            self._lost = True  # later results of this process would be meaningless
        return report

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str) -> None:
        """Count the warnings that threads and finalizers of the backend give between its calls."""
        if when == "runtest":
            said = warning_message
            text = warning_text(said.message, said.category, said.filename, said.lineno)
            self._warned[text] += 1

    def _taken(self) -> dict[str, int]:
        """Return the warnings since the last call, and clear them."""
        taken = dict(self._warned)
        self._warned.clear()
        return taken


def main() -> None:
    """Run pytest for the parent process."""
    number, *arguments = sys.argv[1:]
    child_process.show_stacks_when_asked()  # shows in which line a test hangs
    asked = Asked(child_process.connection_of(int(number)), arguments[0])
    status = pytest.main(arguments, plugins=[asked])
    asked.send("ended", status=int(status))


if __name__ == "__main__":
    main()
