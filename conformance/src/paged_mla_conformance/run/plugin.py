"""The pytest plugin: loads a backend by name and asks it every case.

``paged-mla conformance`` loads it with ``-p``. It is no entry point: whoever installs the
distribution has a pytest that starts without it.
"""

from __future__ import annotations

import difflib
import importlib
import traceback
from collections import Counter
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from paged_mla_conformance.run.declaration import check_backend
from paged_mla_conformance.run.dumping import DUMPING, Dumping
from paged_mla_conformance.run.expected_failures import load_expected_failures
from paged_mla_conformance.run.outcomes import CHECKS, EVERY, EXPECTED, TRIAL, WARNED
from paged_mla_conformance.run.quick.collected import QUICK, quick_choice
from paged_mla_conformance.run.quick.keys import key_of_param
from paged_mla_conformance.run.quick.table import load_table
from paged_mla_conformance.run.status import BROKEN_BACKEND
from paged_mla_conformance.runners.profile import STRICT, load_profile
from paged_mla_conformance.runners.profile_adapter import adapted
from paged_mla_conformance.runners.protocol_guard import GuardedBackend, counted_warnings
from paged_mla_conformance.runners.recording_runner import RecordingBackend
from paged_mla_conformance.suite.selection.core import ALL_DTYPES, CORE, Run
from paged_mla_conformance.suite.selection.items import (
    NOT_RUN,
    RUN,
    is_without_parameter,
    skip_if,
    test_id,
    why_not_asked,
)
from paged_mla_conformance.suite.selection.params import (
    CaseParam,
    TraceParam,
    check_left_out,
    params_of_group,
    trace_params,
)
from paged_mla_conformance.suite.trials.traces import TraceTrial
from paged_mla_conformance.suite.trials.trial import Trial
from paged_mla_reference.tolerance.compare import Check
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.documents import read_toml
from paged_mla_shared.errors import InvalidArgument, OutOfMemory, Unsupported


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("paged-mla", "paged MLA conformance")
    group.addoption("--mla-backend", metavar="MODULE:FACTORY", help="backend under test")
    group.addoption("--mla-dims", choices=sorted(PRESETS), help="model dims (default: the mode's)")
    group.addoption("--mla-dtypes", metavar="A,B", help="element types (default: the mode's)")
    group.addoption("--mla-profile", default=STRICT, metavar="A,B", help="names or TOML files")
    group.addoption("--mla-only", metavar="ID", help="run one case id, as reports print it")
    group.addoption("--mla-quick", action="store_true", help="run few tests that find most faults")
    group.addoption("--mla-expected-failures", type=Path, metavar="TOML")
    group.addoption("--mla-dump", type=Path, metavar="FILE", help="step at which a test failed")


def pytest_configure(config: pytest.Config) -> None:
    """Load the backend and everything the run needs."""
    config.addinivalue_line(
        "markers", "mla(group, ops, features, rules): what a conformance test asks"
    )
    name = config.getoption("--mla-backend")
    if name is None:
        return
    warned = config.stash[WARNED] = Counter()
    with counted_warnings(warned):
        backend = load_backend(name)
    dims = config.getoption("--mla-dims") or CORE[backend.mode].dims
    path = config.getoption("--mla-expected-failures")
    try:
        profile = load_profile(config.getoption("--mla-profile"))
        check_left_out(profile)
        config.stash[EXPECTED] = load_expected_failures(path) if path else {}
    except (OSError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    dtypes = _chosen_dtypes(config.getoption("--mla-dtypes"))
    asked = adapted(GuardedBackend(backend, warned), profile)
    if (dump := config.getoption("--mla-dump")) is not None:
        asked = RecordingBackend(asked)
        config.stash[DUMPING] = Dumping(asked, dump)
    config.stash[RUN] = Run(asked, name, dims, profile, dtypes)
    config.stash[EVERY] = []


def _chosen_dtypes(option: str | None) -> tuple[str, ...]:
    chosen = tuple(option.split(",")) if option is not None else ()
    if not set(chosen) <= set(ALL_DTYPES) or len(set(chosen)) < len(chosen):
        allowed = f"{','.join(ALL_DTYPES)}, each once"
        raise pytest.UsageError(f"--dtypes: got {option!r}; allowed: {allowed}")
    return chosen


def load_backend(name: str) -> Backend:
    """Return the backend that ``module:factory`` makes, or that a TOML file describes.

    The file names its factory, ``factory = "module:factory"``, which gets the file's path.

    Raises
    ------
    pytest.UsageError
        The name is malformed, its module is not there, its factory is missing or raises, or what it
        makes is no backend.
    pytest.exit.Exception
        The factory raised ``Unsupported``: this machine has nothing to ask. Status 5, as for a run
        without tests. Or the module, or something that it imports, cannot be imported: status 2,
        with the traceback.
    """
    is_file = name.endswith(".toml")
    module_name, _, factory = (_factory_in(name) if is_file else name).partition(":")
    if not module_name or not factory:
        allowed = 'MODULE:FACTORY, or a TOML file with factory = "MODULE:FACTORY"'
        raise pytest.UsageError(f"--backend: got {name!r}; allowed: {allowed}")
    try:
        make = getattr(importlib.import_module(module_name), factory, None)
        if make is None:
            raise pytest.UsageError(f"--backend {name}: {module_name} has no attribute {factory!r}")
        if not callable(make):
            kind = type(make).__name__
            raise pytest.UsageError(f"--backend {name}: got an {kind}; allowed: a factory")
        return check_backend(name, make(Path(name)) if is_file else make())
    except pytest.UsageError:
        raise
    except Unsupported as error:
        reason = f"SKIPPED: {name} cannot run here: {error}"
        pytest.exit(reason, returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
    except ImportError as error:
        if f"{module_name}.".startswith(f"{error.name}.") and error.path is None:
            hint = "install it, or run in the folder that holds it"
            raise pytest.UsageError(f"--backend {name}: {error}; {hint}") from error
        reason = f"--backend {name} cannot be imported: {error}\n{_traceback_of(error)}"
        pytest.exit(reason, returncode=BROKEN_BACKEND)
    except BaseException as error:  # SystemExit and pytest's own would end the run without a word
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise pytest.UsageError(f"--backend {name} raised {said}") from error


def _factory_in(path: str) -> str:
    try:
        return str(read_toml(Path(path)).get("factory", ""))
    except InvalidArgument as error:
        raise pytest.UsageError(f"--backend {error}") from error


def _traceback_of(error: ImportError) -> str:
    """Return the traceback of a backend's error, from the backend's own first line on."""
    ours = {__file__, importlib.__file__}
    told = traceback.TracebackException.from_exception(error)
    theirs = (f for f in told.stack if f.filename not in ours and "<frozen " not in f.filename)
    told.stack = traceback.StackSummary.from_list([*theirs])
    return "".join(told.format()).rstrip()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name the backend, its mode and what it is asked."""
    run = config.stash.get(RUN, None)
    if run is None:
        return []
    backend = run.backend
    return [
        f"paged-mla backend: {backend.name} {backend.version} ({run.factory})",
        f"paged-mla mode: {backend.mode} on {backend.device}",
        f"paged-mla dims: {run.dims_name}, dtypes: {' '.join(run.dtypes)}",
        f"paged-mla profile: {run.profile.name}",
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each suite test the cases of its group."""
    marker = metafunc.definition.get_closest_marker("mla")
    wanted = {"trial", "trace_trial"} & set(metafunc.fixturenames)
    if marker is None or not wanted:
        return
    run = metafunc.config.stash.get(RUN, None)
    if run is None:
        raise pytest.UsageError("the paged MLA suite needs --mla-backend MODULE:FACTORY")
    params: Sequence[CaseParam | TraceParam]
    if "trial" in wanted:
        params = params_of_group(run, marker.kwargs["group"])
    else:
        params = trace_params(run)
    assert params, f"group {marker.kwargs['group']} has no case"
    left: list[CaseParam | TraceParam] = [*params]
    if metafunc.definition.get_closest_marker("parametrize") is None:
        left = _left(metafunc.config, metafunc.function.__name__, params)
    metafunc.parametrize(wanted.pop(), left, ids=[p.id for p in left], indirect=True)


def _left(
    config: pytest.Config, function: str, params: Sequence[CaseParam | TraceParam]
) -> list[CaseParam | TraceParam]:
    """Return the parameters that the command line leaves; building a test of each takes a second.

    The others are noted by the ids that their tests would have.
    """
    only = config.getoption("--mla-only")
    left = list(params)
    if only is not None:
        left = [p for p in params if only in {p.id, f"{function}[{p.id}]"}]
    if config.getoption("--mla-quick"):
        table = load_table()
        left = [p for p in left if key_of_param(function, p) in table]
    if len(left) < len(params):
        chosen = {p.id for p in left}
        config.stash[EVERY].extend(f"{function}[{p.id}]" for p in params if p.id not in chosen)
    return left


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Narrow to what is wanted, and compare the expected failures with what exists."""
    if RUN not in config.stash:
        return
    items[:] = [item for item in items if not is_without_parameter(item)]
    suite = [item for item in items if item.get_closest_marker("mla")]
    every: list[str] = config.stash[EVERY]
    every.extend(test_id(item) for item in suite)
    known = set(every)
    expected = config.stash[EXPECTED]
    unknown = set(expected) - known
    if unknown:
        raise pytest.UsageError(f"expected failures that are no test: {sorted(unknown)}")
    only = config.getoption("--mla-only")
    if only is not None:
        chosen = [item for item in suite if only in {test_id(item), _param_id(test_id(item))}]
        if not chosen:
            names = sorted({name for test in known for name in (test, _param_id(test))})
            near = ", ".join(difflib.get_close_matches(only, names))
            hint = f"; near it: {near}" if near else ""
            raise pytest.UsageError(f"--only: no test or case is called {only!r}{hint}")
        items[:] = suite = chosen
    if config.getoption("--mla-quick"):
        config.stash[QUICK], items[:] = quick_choice(suite)
        suite = items
    for item in suite:
        entry = expected.get(test_id(item))
        if entry is not None:
            wrong = (AssertionError, pytest.fail.Exception)  # the latter: bad input was taken
            mark = pytest.mark.xfail(reason=entry.reason, raises=wrong, strict=True)
            item.add_marker(mark)


@pytest.fixture
def mla_run(request: pytest.FixtureRequest) -> Run:
    """Return the run: backend, dims and dtypes."""
    return request.config.stash[RUN]


@pytest.fixture
def trial(request: pytest.FixtureRequest, mla_run: Run) -> Trial:
    """Return the case under test."""
    param: CaseParam = request.param
    item: pytest.Item = request.node
    trial = Trial(mla_run.backend, param.case, mla_run.dims, param.dtype, param.note)
    item.stash[TRIAL] = trial
    return trial


@pytest.fixture
def mla_checks(request: pytest.FixtureRequest) -> list[Check]:
    """Return the list to which a test without a trial adds its comparisons."""
    item: pytest.Item = request.node
    return item.stash.setdefault(CHECKS, [])


@pytest.fixture
def trace_trial(request: pytest.FixtureRequest, mla_run: Run) -> TraceTrial:
    """Return the trace under test."""
    param: TraceParam = request.param
    trial = TraceTrial(mla_run.backend, param.scenario, mla_run.dims, param.dtype, param.note)
    request.node.stash[TRIAL] = trial
    return trial


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip what the device has too little memory for: it is no answer, and it is counted."""
    try:
        return (yield)
    except OutOfMemory:
        skip_if(item, NOT_RUN)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip, with the reason, what the backend does not declare."""
    if item.get_closest_marker("mla") is not None:
        skip_if(item, why_not_asked(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write the dump of a test that failed, where one is wanted."""
    report = yield
    if call.when == "call" and report.failed and DUMPING in item.config.stash:
        item.config.stash[DUMPING].write(test_id(item))
    return report


def _param_id(test: str) -> str:
    return test.partition("[")[2].removesuffix("]")
