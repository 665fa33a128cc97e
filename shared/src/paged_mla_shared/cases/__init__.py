"""The literal case table: one module per group, one line per situation."""

from __future__ import annotations

from paged_mla_shared.cases import (
    append,
    decode,
    empty,
    extend,
    large_offsets,
    layouts,
    masks,
    metadata,
    mixed,
    replay,
    rope,
    verify,
)
from paged_mla_shared.cases.case import Case, Row, TableTail, Tree

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
        rope,
        large_offsets,
        replay,
    )
}

__all__ = ["GROUPS", "Case", "Row", "TableTail", "Tree"]
