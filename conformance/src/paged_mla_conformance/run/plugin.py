"""The pytest plugin: it loads a backend by name and makes a test of each case.

``paged-mla conformance`` loads the plugin with ``-p``. The distribution declares no pytest entry
point, so that other pytest runs in the same environment start without the plugin.
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
    group.addoption("--mla-dims", choices=sorted(PRESETS), help="model dims (default: of the mode)")
    group.addoption("--mla-dtypes", metavar="A,B", help="element types (default: of the mode)")
    group.addoption("--mla-profile", default=STRICT, metavar="A,B", help="names or TOML files")
    group.addoption("--mla-only", metavar="ID", help="run one test or case id from a report")
    group.addoption("--mla-quick", action="store_true", help="run few tests that find most faults")
    group.addoption("--mla-expected-failures", type=Path, metavar="TOML")
    group.addoption("--mla-dump", type=Path, metavar="FILE", help="write the step that failed")


def pytest_configure(config: pytest.Config) -> None:
    """Load the backend, the profile and the expected failures.

    Raises
    ------
    pytest.UsageError
        An option has a wrong value, or the backend cannot be loaded.
    """
    config.addinivalue_line(
        "markers", "mla(group, ops, features, rules): what a conformance test needs and checks"
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
        allowed = f"{','.join(ALL_DTYPES)}, each once at most"
        raise pytest.UsageError(f"--dtypes: got {option!r}; allowed: {allowed}")
    return chosen


def load_backend(name: str) -> Backend:
    """Return the backend that a factory makes.

    Parameters
    ----------
    name : str
        ``module:factory``, or the path of a TOML file with ``factory = "module:factory"``. The
        factory of a TOML file is called with the path of the file, any other without arguments.

    Raises
    ------
    pytest.UsageError
        The name is malformed, the module does not exist, the factory is missing or raises, or the
        object that it returns is not a backend.
    pytest.exit.Exception
        With status 5, as for a run without tests: the factory raised ``Unsupported``, so the
        backend cannot run on this machine. With status 2 and the traceback: the module, or a
        module that it imports, cannot be imported.
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
            raise pytest.UsageError(
                f"--backend {name}: got an object of type {kind}; allowed: a callable"
            )
        return check_backend(name, make(Path(name)) if is_file else make())
    except pytest.UsageError:
        raise
    except Unsupported as error:
        reason = f"SKIPPED: {name} cannot run here: {error}"
        pytest.exit(reason, returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
    except ImportError as error:
        if f"{module_name}.".startswith(f"{error.name}.") and error.path is None:
            hint = "install the module, or run the command in the folder that contains it"
            raise pytest.UsageError(f"--backend {name}: {error}; {hint}") from error
        reason = f"--backend {name} cannot be imported: {error}\n{_traceback_of(error)}"
        pytest.exit(reason, returncode=BROKEN_BACKEND)
    except BaseException as error:  # for example SystemExit, which would end the run silently
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise pytest.UsageError(f"--backend {name} raised {said}") from error


def _factory_in(path: str) -> str:
    try:
        return str(read_toml(Path(path)).get("factory", ""))
    except InvalidArgument as error:
        raise pytest.UsageError(f"--backend {error}") from error


def _traceback_of(error: ImportError) -> str:
    """Return the traceback of an error, without the frames of this module and of importlib."""
    ours = {__file__, importlib.__file__}
    told = traceback.TracebackException.from_exception(error)
    theirs = (f for f in told.stack if f.filename not in ours and "<frozen " not in f.filename)
    told.stack = traceback.StackSummary.from_list([*theirs])
    return "".join(told.format()).rstrip()


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Return lines with the backend, its mode, the dims, the dtypes and the profile."""
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
    """Make the cases, or the traces, of its group the parameters of each suite test."""
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
    """Return the parameters that ``--mla-only`` and ``--mla-quick`` select.

    Pytest takes a second to build a test for each parameter, so the others get no test. This
    function adds the ids that their tests would have to the stash of all test ids.
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
    """Keep the selected tests, and mark those that are expected to fail.

    Raises
    ------
    pytest.UsageError
        ``--only`` or the expected-failures file names a test that does not exist.
    """
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
        raise pytest.UsageError(
            f"--expected-failures: the suite has no test with the ids {sorted(unknown)}"
        )
    only = config.getoption("--mla-only")
    if only is not None:
        chosen = [item for item in suite if only in {test_id(item), _param_id(test_id(item))}]
        if not chosen:
            names = sorted({name for test in known for name in (test, _param_id(test))})
            near = ", ".join(difflib.get_close_matches(only, names))
            hint = f"; similar ids: {near}" if near else ""
            raise pytest.UsageError(f"--only: no test or case has the id {only!r}{hint}")
        items[:] = suite = chosen
    if config.getoption("--mla-quick"):
        config.stash[QUICK], items[:] = quick_choice(suite)
        suite = items
    for item in suite:
        entry = expected.get(test_id(item))
        if entry is not None:
            wrong = (AssertionError, pytest.fail.Exception)  # the latter: bad input was accepted
            mark = pytest.mark.xfail(reason=entry.reason, raises=wrong, strict=True)
            item.add_marker(mark)


@pytest.fixture
def mla_run(request: pytest.FixtureRequest) -> Run:
    """Return the run: the backend, the dims, the profile and the dtypes."""
    return request.config.stash[RUN]


@pytest.fixture
def trial(request: pytest.FixtureRequest, mla_run: Run) -> Trial:
    """Return the trial of the case that is the test's parameter."""
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
    """Return the trial of the trace that is the test's parameter."""
    param: TraceParam = request.param
    trial = TraceTrial(mla_run.backend, param.scenario, mla_run.dims, param.dtype, param.note)
    request.node.stash[TRIAL] = trial
    return trial


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Skip a test in which the backend raises ``OutOfMemory``; the report counts it as skipped."""
    try:
        return (yield)
    except OutOfMemory:
        skip_if(item, NOT_RUN)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that the backend does not support or that the run excludes, with the reason."""
    if item.get_closest_marker("mla") is not None:
        skip_if(item, why_not_asked(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Write a dump of the last step of a test that failed, if the run has ``--mla-dump``."""
    report = yield
    if call.when == "call" and report.failed and DUMPING in item.config.stash:
        item.config.stash[DUMPING].write(test_id(item))
    return report


def _param_id(test: str) -> str:
    return test.partition("[")[2].removesuffix("]")
