"""The capabilities that a backend must declare to support a test."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.selection.items import RUN, marker_of, param_of
from paged_mla_conformance.suite.selection.params import (
    CaseParam,
    TraceParam,
    unmet_by_case,
    unmet_by_trace,
)
from paged_mla_shared.backend import Capabilities

_NOTHING = Capabilities()


def needs_of(item: pytest.Item) -> frozenset[str]:
    """Return a phrase for every capability that a test needs, such as "merge not declared".

    A head count or block size that the case does not fix is not a need, because the suite replaces
    it by the nearest declared one.
    """
    run, marks = item.config.stash[RUN], marker_of(item).kwargs
    needs = [f"{word} not declared" for word in (*marks["ops"], *marks.get("features", ()))]
    param = param_of(item)
    if isinstance(param, CaseParam):
        unmet = unmet_by_case(_NOTHING, param.case, run.dims, param.dtype, marks["ops"])
        free = {"num_heads", "block_size"}.difference(param.case.fixed)
        needs += [need for need in unmet if need.split()[0] not in free]
    elif isinstance(param, TraceParam):
        unmet = unmet_by_trace(_NOTHING, param.scenario, run.dims, param.dtype)
        needs += [need for need in unmet if need.split()[0] not in {"num_heads", "block_size"}]
    return frozenset(needs)
