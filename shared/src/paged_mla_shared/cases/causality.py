"""Cases of causality: changing later tokens must not change earlier outputs (S-4)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row

GROUP = "causality"
PRODUCTION = {"keys": 1700, "queries": 600}


def _causal(name: str, why: str, rows: tuple[Row, ...], num_heads: int) -> Case:
    return Case(
        group=GROUP, name=name, why=why, rules=("S-4", "S-19"), rows=rows, num_heads=num_heads
    )


CASES = (
    _causal("prompt", "queries of a prompt do not see later tokens", (Row(64, 64),), 4),
    _causal(
        "chunks",
        "continued chunks of different lengths",
        (Row(90, 20), Row(130, 7), Row(33, 33)),
        6,
    ),
    _causal("600-queries", "a long chunk after a context", (Row(1700, 600),), 1),
    _causal(
        "drafts",
        "a rejected draft token does not change accepted tokens",
        (Row(68, 5), Row(130, 4)),
        16,
    ),
)
