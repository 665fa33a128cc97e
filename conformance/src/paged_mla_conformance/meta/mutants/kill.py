"""Run the suite on one mutant and record which groups kill it, and by which rule."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from paged_mla_conformance import suite
from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import BOUNDED, SCHEDULES, broken_engine, changes
from paged_mla_conformance.run.quick.keys import key_of
from paged_mla_conformance.run.quick.needs import needs_of
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS
from paged_mla_conformance.suite.selection.items import marker_of, param_of
from paged_mla_conformance.suite.selection.params import CaseParam, TraceParam
from paged_mla_reference.faults import IN_16_BITS
from paged_mla_reference.tolerance.compare import Mismatch

BACKENDS = "paged_mla_conformance.meta.mutants.backends"
_NAMED = "rule"  # a kill by an assertion that names a rule which the mutant breaks
_OTHER = "other"  # a kill by an assertion that names only other rules
_CRASH = "crash"


class NothingAsked(RuntimeError):
    """No test of the suite ran on a mutant."""


@dataclass
class Kills:
    """The tests that one mutant fails.

    Parameters
    ----------
    name : str
        The name of the mutant, or of a right backend.
    groups : dict of str to dict of str to str
        For each group, the first test of each kind of kill: "rule", "other", "crash".
    tests : dict of str to float
        Keys of the tests that kill the mutant by a rule which it breaks, with their milliseconds.
        For a right backend, every test that it passed.
    needs : dict of str to frozenset of str
        For a right backend, the capabilities that each of these tests needs.
    seconds : float
        Processor time of the run.
    """

    name: str
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    needs: dict[str, frozenset[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def by(self, kind: str = _NAMED) -> list[str]:
        """Return the groups with that kind of kill."""
        return [group for group in SUITE_GROUPS if kind in self.groups.get(group, {})]

    @property
    def killed(self) -> bool:
        """Whether an assertion of a rule that the mutant breaks failed."""
        return bool(self.by())

    @property
    def misjudged(self) -> bool:
        """Whether a test failed, but no assertion of a rule that the mutant breaks."""
        return bool(self.groups) and not self.killed


class Recorder:
    """Pytest plugin that records kills and skips tests that can show nothing new.

    Parameters
    ----------
    kills : Kills
        The kills are added to it.
    rules : tuple of str
        The rules that the mutant breaks.
    every : bool
        Whether the other tests of a group run after one test has killed the mutant.
    """

    def __init__(self, kills: Kills, rules: tuple[str, ...], *, every: bool) -> None:
        self._kills = kills
        self._every = every
        self._rules = set(rules)
        self._changes = changes(kills.name)
        self.tests = 0

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Sort the small cases first, because most mutants are killed by them."""
        items.sort(key=_size)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Skip groups that have killed the mutant, large cases, and unchanged operations."""
        self.tests += 1
        group = marker_of(item).kwargs["group"]
        if self._changes.isdisjoint(_asks(item)):
            pytest.skip("the mutant does not change these operations")
        if _is_large(item):
            pytest.skip("the case has production sizes; smaller cases test the same")
        if not self._every and _NAMED in self._kills.groups.get(group, {}):
            pytest.skip("the group of this test has killed the mutant")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        """Record a failure by its kind; for a right backend, record each test that passes."""
        if call.excinfo is None:
            if call.when == "call" and self._kills.name not in MUTANTS:
                self._kills.tests[key_of(item)] = call.duration * 1e3
                self._kills.needs[key_of(item)] = needs_of(item)
            return
        if call.excinfo.errisinstance(pytest.skip.Exception):
            return
        group = marker_of(item).kwargs["group"]
        kind = self._kind(item, call.excinfo.value)
        if kind == _NAMED:
            self._kills.tests[key_of(item)] = call.duration * 1e3
        self._kills.groups.setdefault(group, {}).setdefault(kind, item.name)

    def _kind(self, item: pytest.Item, error: BaseException) -> str:
        if isinstance(error, Mismatch):
            named = {error.rule}
        elif isinstance(error, AssertionError | pytest.fail.Exception):
            named = set(_rules_of(item))
        else:
            return _CRASH
        return _NAMED if named & self._rules else _OTHER


def _size(item: pytest.Item) -> int:
    """Return a measure of the work of a test, for comparison within its group."""
    param = param_of(item)
    if param is None:
        return 0
    if isinstance(param, TraceParam):
        return param.scenario.config.token_budget
    return sum(row.seq_len * row.query_len for step in param.case.steps for row in step)


def _is_large(item: pytest.Item) -> bool:
    param = param_of(item)
    return isinstance(param, CaseParam) and param.case.is_large


def _asks(item: pytest.Item) -> set[str]:
    """Return the operations that a test calls; schedules with several ranks also merge."""
    marks = marker_of(item).kwargs
    more = {"trace": ("merge", SCHEDULES), "bounded": (BOUNDED,)}
    return {*marks["ops"], *more.get(marks["group"], ())}


def _rules_of(item: pytest.Item) -> tuple[str, ...]:
    """Return the rules that a test checks; a failure that names no rule breaks these."""
    param = param_of(item)
    if isinstance(param, CaseParam):
        return param.case.rules
    rules: tuple[str, ...] = marker_of(item).kwargs["rules"]
    return rules


def kill(name: str, *chosen: str, every: bool = False) -> Kills:
    """Run the suite on the mutant `name`.

    Parameters
    ----------
    name : str
    chosen : str
        Arguments for pytest that select tests.
    every : bool
        Whether each test runs. Otherwise a group ends with the first test that kills the mutant.

    Raises
    ------
    NothingAsked
        No test ran.
    """
    kills = Kills(name)
    rules = MUTANTS[name].rules if name in MUTANTS else ()
    recorder = Recorder(kills, rules, every=every)
    started = time.process_time()
    with broken_engine(name), _silence():
        pytest.main(_arguments(name, chosen), plugins=[recorder])
    if not recorder.tests:
        raise NothingAsked(f"no test of the suite ran on {name}")
    kills.seconds = round(time.process_time() - started, 2)
    return kills


def _arguments(name: str, chosen: tuple[str, ...]) -> list[str]:
    folder = Path(suite.__file__).parent
    return [
        str(folder),
        *("-c", str(folder / "pytest.ini")),
        *("-p", "paged_mla_conformance.run.plugin"),
        *("--quiet", "--tb=no", "--no-header", "--no-summary"),
        f"--mla-backend={BACKENDS}:{name}",
        f"--mla-dtypes={'bfloat16' if name in IN_16_BITS else 'float32'}",
        *chosen,
    ]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
