"""Cases of several steps on one runner: no data of an earlier step may be used (S-17)."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing

GROUP = "replay"
PRODUCTION = {"keys": 16384, "queries": 600, "rows": 300, "tree": 64, "steps": 4}


def _decode(*seq_lens: int) -> tuple[Row, ...]:
    return tuple(Row(n, 1) for n in seq_lens)


def _drafts(query_len: int, *contexts: int) -> tuple[Row, ...]:
    return tuple(Row(context + query_len, query_len) for context in contexts)


def _replay(
    name: str,
    why: str,
    *steps: tuple[Row, ...],
    num_heads: int = 8,
    table_tail: TableTail = TableTail.FOREIGN,
    **more: Any,
) -> Case:
    """Return a case of the group; `more` are fields of :class:`Case`."""
    return Case(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-17", "S-9"),
        rows=steps[0],
        then=steps[1:],
        num_heads=num_heads,
        table_tail=table_tail,
        **more,
    )


CASES = (
    _replay("longer", "lengths are read in every step", _decode(8, 3), _decode(300, 65)),
    _replay("shorter", "stale table entries are not read", _decode(300, 65), _decode(8, 3)),
    _replay(
        "fewer-rows", "rows of a larger step are not used", _decode(*range(60, 68)), _decode(70, 5)
    ),
    _replay("more-rows", "the schedule grows", _decode(70), _decode(*range(60, 68))),
    _replay(
        "8-3-1-8",
        "batch sizes that grow and shrink",
        *(_decode(*range(50, 50 + n)) for n in (8, 3, 1, 8)),
        cache_scale=7.0,
    ),
    _replay(
        "empty-then-full", "an idle step before a full one", (Row(0, 1),), _decode(100, 200, 1)
    ),
    _replay("full-then-empty", "an idle step after a full one", _decode(100, 200, 1), (Row(0, 1),)),
    _replay(
        "decode-extend-decode",
        "query lengths change between steps",
        _decode(65, 64),
        (Row(40, 40), Row(90, 12)),
        _decode(66, 41),
    ),
    _replay(
        "other-query-lengths",
        "equally many rows and tokens, but other query lengths",
        (Row(70, 4), Row(130, 1), Row(9, 2)),
        (Row(66, 1), Row(131, 4), Row(20, 2)),
        (Row(80, 2), Row(60, 2), Row(30, 3)),
    ),
    _replay(
        "trees",
        "other masks in the same buffer: fewer nodes, then another mask of the same lengths",
        _drafts(8, 60, 0),
        _drafts(3, 130),
        _drafts(8, 1, 2),
        _drafts(8, 1, 2),
        mask=Mask.TREE,
    ),
    _replay(
        "16k-and-back",
        "a step of long rows between steps of short rows",
        _decode(9, 70, 3),
        _decode(16500, 1025, 600),
        (Row(650, 600), Row(9, 1)),
        _decode(70, 2050),
        num_heads=1,
        is_slow=True,
    ),
    _replay(
        "300-rows-and-back",
        "a step of 300 rows, two fifths of them padded, between small steps",
        _decode(70, 3, 5),
        _decode(*(i % 60 if i % 5 < 3 else 0 for i in range(300))),
        _decode(7, 130, 4),
        num_heads=1,
        is_slow=True,
    ),
    _replay(
        "third-of-four",
        "three rows after a step of four",
        _decode(100, 200, 300, 400),
        _decode(101, 201, 301),
        _decode(102, 202),
    ),
    *(
        _replay(
            f"trees-{spelling}",
            "trees of other sizes, with padded rows between them",
            (*_drafts(12, 60, 7), Row(0, 2)),
            (Row(0, 3), *_drafts(12, 61, 8)),
            _drafts(33, 130),
            _drafts(3, 1, 2, 70, 90),
            mask=Mask.TREE,
            mask_spelling=spelling,
            num_heads=2,
        )
        for spelling in MaskSpelling
    ),
    *(
        _replay(
            f"bs{bs}",
            "alternately chunks and decode rows, with other block sizes",
            (Row(20, 20), Row(70, 1)),
            _decode(21, 300),
            (Row(40, 9), Row(301, 1), Row(5, 5)),
            num_heads=heads,
            block_size=bs,
            rope=rope,
        )
        for bs, heads, rope in (
            (1, 20, None),
            (16, 3, Rope(RopePairing.NEOX)),
            (48, 40, None),
            (256, 2, Rope(RopePairing.INTERLEAVED)),
        )
    ),
    _replay(
        "same-shapes",
        "rows of the same lengths with other blocks and contents",
        _decode(70, 130, 5),
        _decode(70, 130, 5),
        _decode(70, 130, 5),
        num_heads=3,
        spare=3,
    ),
    _replay(
        "rows-change-places",
        "equally many tokens and rows, in another order",
        (Row(70, 4), Row(0, 1), Row(130, 1), Row(300, 1)),
        (Row(300, 1), Row(130, 1), Row(0, 1), Row(70, 4)),
        (Row(130, 1), Row(70, 4), Row(300, 1), Row(0, 1)),
        num_heads=3,
        padded_tokens=2,
    ),
    _replay(
        "trees-64",
        "wide masks after narrow masks, and narrow after wide",
        _drafts(12, 60, 7),
        _drafts(64, 130, 900),
        _drafts(33, 1, 2),
        mask=Mask.TREE,
        num_heads=1,
    ),
    _replay("padded-tokens", "padding after padding", _decode(65, 3), _decode(9), padded_tokens=3),
    _replay(
        "trees-rope",
        "draft tokens are rotated by their current positions",
        _drafts(8, 62),
        _drafts(8, 82),
        mask=Mask.TREE,
        rope=Rope(RopePairing.NEOX),
        num_heads=2,
    ),
    _replay(
        "slots",
        "slots are read in every step",
        (Row(200, 4), Row(9, 2)),
        (Row(200, 4), Row(9, 2)),
        explicit_slots=True,
        slot_order=SlotOrder.TABLE,
        num_heads=2,
    ),
)
