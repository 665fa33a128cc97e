"""Queries that see one value: the answer is that value, bit for bit (S-22)."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.problem import Mask

GROUP = "exact"

HEADS = (1, 5, 16, 40, 64, 128)


def _exact(name: str, why: str, rows: tuple[Row, ...], **more: Any) -> Case:
    """Return a case of the group; `more` are fields of :class:`Case`."""
    return Case(group=GROUP, name=name, why=why, rules=("S-5", "S-22"), rows=rows, **more)


CASES = (
    *(
        _exact(
            f"one-key-h{h}",
            "a weight that is not 1 is rounded, and does not cancel",
            (Row(1, 1),) * 33,
            num_heads=h,
            fixed=("num_heads",),
        )
        for h in HEADS
    ),
    _exact(
        "one-key-beside-many",
        "a row of one key has a share of a program that others cut",
        (Row(1, 1), Row(1500, 1), Row(1, 1), Row(70, 1), Row(1, 1)),
        num_heads=16,
    ),
    _exact("first-queries", "the first query of a prompt sees itself", (Row(64, 64), Row(3, 3))),
    _exact(
        "roots",
        "nodes of a draft tree without a context see themselves alone",
        (Row(7, 7), Row(5, 5)),
        mask=Mask.TREE,
        tree=Tree.FOREST,
    ),
    _exact(
        "fewer-keys-than-queries",
        "all queries of a non-causal row see its one key",
        (Row(1, 2), Row(1, 5)),
        mask=Mask.NON_CAUSAL,
    ),
    *(
        _exact(
            f"equal-keys-h{h}",
            "weights that are all the same cancel, however many splits share them",
            tuple(Row(n, 1) for n in (2, 3, 63, 64, 65, 129, 1000, 4097)),
            num_heads=h,
            equal_keys=True,
        )
        for h in (1, 16, 128)
    ),
    _exact(
        "equal-keys-of-chunks",
        "each query of a chunk sees one value, however many keys",
        (Row(70, 6), Row(130, 70), Row(4, 4)),
        num_heads=16,
        equal_keys=True,
    ),
)
