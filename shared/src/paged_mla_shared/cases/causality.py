"""Rows on which later tokens are changed: earlier answers keep their bits (S-4)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row

GROUP = "causality"
PRODUCTION = {"keys": 1700, "queries": 600}


def _causal(name: str, why: str, rows: tuple[Row, ...], num_heads: int) -> Case:
    return Case(
        group=GROUP, name=name, why=why, rules=("S-4", "S-19"), rows=rows, num_heads=num_heads
    )


CASES = (
    _causal("prompt", "a prompt sees nothing of its future", (Row(64, 64),), 4),
    _causal("chunks", "continued chunks, ragged", (Row(90, 20), Row(130, 7), Row(33, 33)), 6),
    _causal("600-queries", "a long chunk behind a context", (Row(1700, 600),), 1),
    _causal("drafts", "a rejected draft leaves the accepted ones", (Row(68, 5), Row(130, 4)), 16),
)
