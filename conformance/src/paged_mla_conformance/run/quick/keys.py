"""The key of a test: its name without the element type."""

from __future__ import annotations

import pytest

from paged_mla_conformance.suite.selection.items import param_of
from paged_mla_conformance.suite.selection.params import CaseParam, TraceParam


def key_of(item: pytest.Item) -> str:
    """Return the key of a collected test, such as ``test_decode[decode-bs16]``."""
    param = param_of(item)
    return item.name if param is None else item.name.replace(param.id, _untyped(param))


def key_of_param(function: str, param: CaseParam | TraceParam) -> str:
    """Return the key of a test function with this parameter."""
    return f"{function}[{_untyped(param)}]"


def _untyped(param: CaseParam | TraceParam) -> str:
    if isinstance(param, CaseParam):
        name, cache_format = param.case.id, param.case.cache_format
    else:
        name, cache_format = f"trace-{param.scenario.name}", param.scenario.cache_format
    return f"{name}+{cache_format}" if cache_format else name
