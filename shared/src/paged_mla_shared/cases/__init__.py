"""The literal case table: one module per group, one line per situation."""

from __future__ import annotations

from paged_mla_shared.cases import (
    append,
    causality,
    decode,
    deterministic,
    empty,
    extend,
    formats,
    gather,
    invariance,
    large_offsets,
    layouts,
    masks,
    metadata,
    mixed,
    replay,
    rope,
    siblings,
    verify,
)
from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail, Tree
from paged_mla_shared.cases.merge import MERGES, MergeCase

GROUPS: dict[str, tuple[Case, ...]] = {
    module.GROUP: module.CASES
    for module in (
        metadata,
        append,
        decode,
        extend,
        mixed,
        verify,
        empty,
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
        deterministic,
    )
}

__all__ = ["GROUPS", "MERGES", "Case", "MergeCase", "Row", "SlotOrder", "TableTail", "Tree"]
