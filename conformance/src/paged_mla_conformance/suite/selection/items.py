"""Properties of a collected test: its id, its case, its traits, and why it does not run."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.params import (
    CaseParam,
    Skip,
    TraceParam,
    why_left_out,
    why_skip,
    why_skip_trace,
    why_skip_word,
)
from paged_mla_conformance.suite.selection.traits import Traits, traits_of_case
from paged_mla_shared.cases import Case
from paged_mla_shared.formats import format_of

RUN = pytest.StashKey[Run]()
SKIP = pytest.StashKey[Skip]()
NOT_RUN = Skip("the device has too little memory")
"""Why a test is skipped during which the backend raised ``OutOfMemory``."""


def marker_of(item: pytest.Item) -> pytest.Mark:
    """Return the ``mla`` marker of a suite test."""
    marker = item.get_closest_marker("mla")
    assert marker is not None
    return marker


def test_id(item: pytest.Item) -> str:
    """Return ``test_function[param]``, the id of a test in reports and expected-failures files."""
    return item.name


def skip_if(item: pytest.Item, skip: Skip | None) -> None:
    """Skip a test and record the reason, unless `skip` is ``None``."""
    if skip is not None:
        item.stash[SKIP] = skip
        pytest.skip(skip.reason)


def param_of(item: pytest.Item) -> CaseParam | TraceParam | None:
    """Return the case or the schedule of a test; ``None`` if the test builds its own steps."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    param = params.get("trial", params.get("trace_trial"))
    return param if isinstance(param, CaseParam | TraceParam) else None


def is_without_parameter(item: pytest.Item) -> bool:
    """Return whether a test needs a case or a schedule and the selection left none for it."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    return not {"trial", "trace_trial"}.isdisjoint(params) and param_of(item) is None


def traits_of(item: pytest.Item) -> Traits:
    """Return the traits of a test; tests without a case have few traits."""
    run, param = item.config.stash[RUN], param_of(item)
    asked: Traits = {"operations": list(marker_of(item).kwargs["ops"])}
    if isinstance(param, CaseParam):
        return asked | traits_of_case(run, param.case, param.dtype)
    if isinstance(param, TraceParam):
        scenario = param.scenario
        asked["dtype"] = param.dtype
        asked["cache_format"] = format_of(param.dtype, scenario.cache_format)
        asked["heads"] = scenario.num_heads or run.dims.num_heads
        asked["block_size"] = scenario.config.block_size
    return asked


def why_not_asked(item: pytest.Item) -> Skip | None:
    """Return why a test does not run on the backend, or ``None`` if it runs."""
    run, marks = item.config.stash[RUN], marker_of(item).kwargs
    skip = why_left_out(run, marks["group"], case_id(item))
    for word in (*marks["ops"], *marks.get("features", ())):
        skip = skip or why_skip_word(run, word)
    param = param_of(item)
    if isinstance(param, CaseParam):
        skip = skip or why_skip(run, param, marks["ops"])
    elif isinstance(param, TraceParam):
        skip = skip or why_skip_trace(run, param)
    return skip


def case_id(item: pytest.Item) -> str | None:
    """Return the id of a test's case; ``None`` if the test builds its own steps."""
    case = case_of(item)
    return case.id if case else None


def is_huge(item: pytest.Item) -> bool:
    """Return whether a test has a cache of gigabytes, so that ids and offsets need many bits."""
    case = case_of(item)
    return case is not None and case.placed_high


def case_of(item: pytest.Item) -> Case | None:
    """Return the case of a test; ``None`` if the test builds its own steps."""
    param = param_of(item)
    return param.case if isinstance(param, CaseParam) else None
