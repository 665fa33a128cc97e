"""What a backend must declare for a test."""

from __future__ import annotations

import pytest

from paged_mla_conformance.collector import RUN, marker_of, param_of
from paged_mla_conformance.selection import CaseParam, TraceParam, unmet_by_case, unmet_by_trace
from paged_mla_shared.backend import Capabilities

_NOTHING = Capabilities()


def needs_of(item: pytest.Item) -> frozenset[str]:
    """Return every capability that a test needs, one phrase each."""
    run, marks = item.config.stash[RUN], marker_of(item).kwargs
    needs = [f"{word} not declared" for word in (*marks["ops"], *marks.get("features", ()))]
    param = param_of(item)
    if isinstance(param, CaseParam):
        needs += unmet_by_case(_NOTHING, param.case, run.dims, param.dtype, marks["ops"])
    elif isinstance(param, TraceParam):
        needs += unmet_by_trace(_NOTHING, param.scenario, run.dims, param.dtype)
    return frozenset(needs)
