"""Cases of batch invariance: a row's bits do not depend on order or other rows (S-20)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group
from paged_mla_shared.problem import Mask

GROUP = "batch_invariant"
PRODUCTION = {"keys": 4096, "rows": 200, "heads": 128}

_rows = in_group(GROUP, "S-20", padded_tokens=2, features=(GROUP,))

CASES = (
    _rows(
        "decode",
        "one row is much longer, so that without it the work is divided differently",
        (Row(200, 1), Row(33, 1), Row(0, 1), Row(900, 1)),
        num_heads=16,
    ),
    _rows(
        "decode-wide", "a token fills several query tiles", (Row(600, 1), Row(90, 1)), num_heads=128
    ),
    _rows(
        "chunks",
        "continued chunks of different lengths",
        (Row(90, 10), Row(0, 3), Row(560, 6)),
        num_heads=6,
    ),
    _rows(
        "mixed",
        "chunks together with decode rows, which have fewer query tiles",
        (Row(260, 1), Row(330, 9), Row(600, 1)),
        num_heads=8,
    ),
    _rows(
        "fewer-tokens-than-rows",
        "a row of several queries in a step with fewer tokens than rows",
        (Row(200, 3), Row(60, 1), *(Row(0, 0) for _ in range(6))),
        num_heads=16,
    ),
    _rows(
        "4k-keys", "many splits of one row", (Row(4200, 3), Row(70, 1), Row(2100, 1)), num_heads=2
    ),
    _rows(
        "200-rows",
        "more rows than a device has processors",
        tuple(Row(1 + 7 * i % 90, 1) for i in range(200)),
        num_heads=2,
    ),
    _rows(
        "drafts",
        "draft trees of two lengths",
        (Row(68, 5), Row(530, 3)),
        num_heads=16,
        mask=Mask.TREE,
    ),
    _rows(
        "non-causal",
        "queries that see their whole row",
        (Row(90, 3), Row(400, 5)),
        num_heads=8,
        mask=Mask.NON_CAUSAL,
    ),
    _rows(
        "non-causal-short",
        "rows with fewer keys than queries",
        (Row(3, 5), Row(400, 5), Row(64, 66), Row(1, 3)),
        num_heads=8,
        mask=Mask.NON_CAUSAL,
    ),
)
