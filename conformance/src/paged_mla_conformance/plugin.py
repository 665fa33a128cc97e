"""The pytest plugin: loads a backend by name and asks it every case.

Inert unless ``--mla-backend`` is given. The verdict is said by ``paged-mla conformance``.
"""

from __future__ import annotations

import difflib
import importlib
from collections import Counter
from pathlib import Path

import pytest

from paged_mla_conformance.collector import (
    CHECKS,
    EXPECTED,
    RUN,
    TRIAL,
    WARNED,
    case_id,
    marker_of,
    skip_if,
    test_id,
)
from paged_mla_conformance.convention import STRICT, load_profile
from paged_mla_conformance.declared import check_backend
from paged_mla_conformance.expected import load_expected_failures
from paged_mla_conformance.guarded import GuardedBackend, counted_warnings
from paged_mla_conformance.presented import presented
from paged_mla_conformance.profile import ALL_DTYPES, CORE, Run
from paged_mla_conformance.selection import (
    CaseParam,
    TraceParam,
    check_left_out,
    params_of_group,
    trace_params,
    why_left_out,
    why_skip,
    why_skip_trace,
    why_skip_word,
)
from paged_mla_conformance.traces import TraceTrial
from paged_mla_conformance.trial import Trial
from paged_mla_reference.judging.compare import Check
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import PRESETS
from paged_mla_shared.errors import Unsupported


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's options."""
    group = parser.getgroup("paged-mla", "paged MLA conformance")
    group.addoption("--mla-backend", metavar="MODULE:FACTORY", help="backend under test")
    group.addoption("--mla-dims", choices=sorted(PRESETS), help="model dims (default: the mode's)")
    group.addoption("--mla-dtypes", metavar="A,B", help="element types (default: the mode's)")
    group.addoption("--mla-profile", default=STRICT, metavar="A,B", help="names or TOML files")
    group.addoption("--mla-only", metavar="ID", help="run one case id, as reports print it")
    group.addoption("--mla-expected-failures", type=Path, metavar="TOML")


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
    guarded = GuardedBackend(backend, warned)
    config.stash[RUN] = Run(presented(guarded, profile), name, dims, profile, dtypes)


def _chosen_dtypes(option: str | None) -> tuple[str, ...]:
    chosen = tuple(option.split(",")) if option is not None else ()
    if not set(chosen) <= set(ALL_DTYPES) or len(set(chosen)) < len(chosen):
        allowed = f"{','.join(ALL_DTYPES)}, each once"
        raise pytest.UsageError(f"--dtypes: got {option!r}; allowed: {allowed}")
    return chosen


def load_backend(name: str) -> Backend:
    """Return the backend that ``module:factory`` makes.

    Raises
    ------
    pytest.UsageError
        The name is malformed, its module cannot be imported, its factory is missing or raises, or
        what it makes is no backend.
    pytest.exit.Exception
        A package that the module needs is not installed, or the factory raised ``Unsupported``:
        this machine has nothing to ask. Status 5, as for a run without tests.
    """
    module_name, _, factory = name.partition(":")
    if not module_name or not factory:
        raise pytest.UsageError(f"--backend: got {name!r}; allowed: MODULE:FACTORY")
    try:
        make = getattr(importlib.import_module(module_name), factory, None)
        if make is None:
            raise pytest.UsageError(f"--backend {name}: {module_name} has no attribute {factory!r}")
        if not callable(make):
            kind = type(make).__name__
            raise pytest.UsageError(f"--backend {name}: got an {kind}; allowed: a factory")
        return check_backend(name, make())
    except pytest.UsageError:
        raise
    except (ModuleNotFoundError, Unsupported) as error:
        if f"{module_name}.".startswith(f"{getattr(error, 'name', None)}."):
            raise pytest.UsageError(f"--backend {name}: {error}") from error
        reason = f"SKIPPED: {name} cannot run here: {error}"
        pytest.exit(reason, returncode=pytest.ExitCode.NO_TESTS_COLLECTED)
    except BaseException as error:  # SystemExit and pytest's own would end the run without a word
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise pytest.UsageError(f"--backend {name} raised {said}") from error


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
    params: list[CaseParam] | list[TraceParam]
    if "trial" in wanted:
        params = params_of_group(run, marker.kwargs["group"])
    else:
        params = trace_params(run)
    assert params, f"group {marker.kwargs['group']} has no case"
    metafunc.parametrize(wanted.pop(), params, ids=[p.id for p in params], indirect=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Narrow to one id, and hold the expected failures against what exists."""
    if RUN not in config.stash:
        return
    suite = [item for item in items if item.get_closest_marker("mla")]
    known = {test_id(item) for item in suite}
    expected = config.stash[EXPECTED]
    unknown = set(expected) - known
    if unknown:
        raise pytest.UsageError(f"expected failures that are no test: {sorted(unknown)}")
    only = config.getoption("--mla-only")
    if only is not None:
        chosen = [item for item in suite if only in {test_id(item), _param_id(item)}]
        if not chosen:
            names = sorted({name for item in suite for name in (test_id(item), _param_id(item))})
            near = ", ".join(difflib.get_close_matches(only, names))
            hint = f"; near it: {near}" if near else ""
            raise pytest.UsageError(f"--only: no test or case is called {only!r}{hint}")
        items[:] = suite = chosen
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
    """Return the case under test, or skip it with the reason."""
    param: CaseParam = request.param
    item: pytest.Item = request.node
    skip = why_skip(mla_run, param, marker_of(item).kwargs["ops"])
    skip_if(item, skip)
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
    """Return the trace under test, or skip it with the reason."""
    param: TraceParam = request.param
    skip_if(request.node, why_skip_trace(mla_run, param))
    trial = TraceTrial(mla_run.backend, param.scenario, mla_run.dims, param.dtype, param.note)
    request.node.stash[TRIAL] = trial
    return trial


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests whose ops or features the backend does not declare."""
    marker = item.get_closest_marker("mla")
    if marker is None:
        return
    skip_if(item, why_left_out(item.config.stash[RUN], marker.kwargs["group"], case_id(item)))
    for word in (*marker.kwargs["ops"], *marker.kwargs.get("features", ())):
        skip_if(item, why_skip_word(item.config.stash[RUN], word))


def _param_id(item: pytest.Item) -> str:
    return item.name.partition("[")[2].removesuffix("]")
