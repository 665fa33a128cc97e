"""The literal table of cases: one module per group, one entry per case."""

from __future__ import annotations

from collections.abc import Mapping

from paged_mla_shared.cases import (
    append,
    batch_invariant,
    bounded,
    causality,
    decode,
    empty,
    exact,
    extend,
    formats,
    gather,
    invariance,
    large_offsets,
    layer,
    layouts,
    masks,
    merge,
    metadata,
    mixed,
    prefill,
    queries,
    replay,
    rope,
    siblings,
    verify,
)
from paged_mla_shared.cases.bounded import CASES as ILLEGALS
from paged_mla_shared.cases.bounded import GROUP as BOUNDED
from paged_mla_shared.cases.bounded import IllegalCase
from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail, Tree
from paged_mla_shared.cases.merge import MERGES, MergeCase
from paged_mla_shared.cases.prefill import CASES as PREFILLS
from paged_mla_shared.cases.prefill import GROUP as PREFILL
from paged_mla_shared.cases.prefill import PrefillCase
from paged_mla_shared.cases.queries import CASES as QUERIES
from paged_mla_shared.cases.queries import GROUP as QUERY
from paged_mla_shared.cases.queries import QueryCase

_STEPS = (
    metadata,
    append,
    decode,
    extend,
    mixed,
    verify,
    empty,
    exact,
    layouts,
    masks,
    causality,
    siblings,
    rope,
    large_offsets,
    replay,
    gather,
    formats,
    invariance,
    batch_invariant,
    layer,
)

GROUPS: dict[str, tuple[Case, ...]] = {module.GROUP: module.CASES for module in _STEPS}

CASES: dict[str, tuple[Case, ...]] = {
    **GROUPS,
    QUERY: QUERIES,
    PREFILL: PREFILLS,
    BOUNDED: ILLEGALS,
}
"""All cases but merges: those of :data:`GROUPS`, which are legal steps over a cache, and those
without a cache and of illegal steps."""

PRODUCTION: dict[str, Mapping[str, float]] = {
    **{module.GROUP: module.PRODUCTION for module in (*_STEPS, queries, prefill, bounded)},
    "merge": merge.PRODUCTION,
}
"""The sizes that production is known to need, by group; the cases of the group reach them."""

__all__ = [
    "CASES",
    "GROUPS",
    "MERGES",
    "PREFILLS",
    "PRODUCTION",
    "QUERIES",
    "Case",
    "IllegalCase",
    "MergeCase",
    "PrefillCase",
    "QueryCase",
    "Row",
    "SlotOrder",
    "TableTail",
    "Tree",
]
