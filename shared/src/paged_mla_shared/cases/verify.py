"""Cases of speculative verification: chains and draft trees."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.problem import Mask, MaskSpelling

GROUP = "verify"
PRODUCTION = {"keys": 26000, "queries": 64, "rows": 130, "tree": 64, "heads": 64}


def _chain(name: str, why: str, rows: tuple[Row, ...], num_heads: int | None = None) -> Case:
    return Case(
        group=GROUP,
        name=f"chain-{name}",
        why=why,
        rules=("S-2", "S-3", "S-4"),
        rows=rows,
        num_heads=num_heads,
    )


def _tree(
    name: str,
    why: str,
    rows: tuple[Row, ...],
    *,
    num_heads: int | None = 16,
    **more: Any,
) -> Case:
    """Return a case of the group; `more` are fields of :class:`Case`."""
    return Case(
        group=GROUP,
        name=f"tree-{name}",
        why=why,
        rules=("S-3", "S-4", "S-14"),
        rows=rows,
        num_heads=num_heads,
        mask=Mask.TREE,
        **more,
    )


def _uniform(query_len: int, *contexts: int) -> tuple[Row, ...]:
    return tuple(Row(context + query_len, query_len) for context in contexts)


CASES = (
    *(
        _chain(f"q{q}", "uniform drafts across a block edge", _uniform(q, 0, 62, 130), num_heads=16)
        for q in range(2, 9)
    ),
    _chain(
        "ragged",
        "rows with 1 to 8 draft tokens",
        tuple(Row(60 + 7 * q, q) for q in range(1, 9)),
        num_heads=8,
    ),
    _chain(
        "h12-q5",
        "rows whose pairs of query and head cross the edges of tiles",
        _uniform(5, 64, 3),
        num_heads=12,
    ),
    _chain("full-heads", "all heads of the model", _uniform(4, 100, 190)),
    *(
        _tree(f"n{n}", "draft nodes of one row share positions, not slots", _uniform(n, 0, 64, 121))
        for n in (1, 2, 8, 16, 33, 64)
    ),
    _tree(
        "ragged",
        "the start of the mask differs for each row",
        (Row(70, 8), Row(3, 3), Row(200, 1), Row(135, 17)),
    ),
    _tree("star", "siblings see the root and themselves", _uniform(8, 50, 130), tree=Tree.STAR),
    _tree(
        "forest", "no node is an ancestor of all nodes", _uniform(8, 50, 0, 130), tree=Tree.FOREST
    ),
    _tree("chain", "a chain given as a tree", _uniform(6, 63, 129), tree=Tree.CHAIN),
    _tree(
        "h9", "an odd number of heads, in tiles of nodes and heads", _uniform(7, 61), num_heads=9
    ),
    _tree("full-heads", "all heads of the model", _uniform(8, 100), num_heads=None),
    _tree("bs16", "a tree over several blocks", _uniform(24, 10, 31), block_size=16),
    _chain(
        "q5-26k",
        "a second row of several tokens after a long context",
        _uniform(5, 300, 26400),
        num_heads=1,
    ),
    *(
        _chain(
            f"q{q}-4k",
            "query lengths that are not powers of two, after contexts",
            _uniform(q, 4096, 5000, 4090),
            num_heads=2,
        )
        for q in (3, 7)
    ),
    _chain(
        "h64-q4-5k",
        "draft tokens of many heads after a long context, and a short row",
        _uniform(4, 5000, 70),
        num_heads=64,
    ),
    _chain(
        "q8-over-tiles",
        "draft tokens that cross the edge of a key tile at every offset",
        (
            *(Row(124 + i, 8) for i in range(16)),
            *(Row(tile + d, 8) for tile in (96, 192, 320) for d in (-1, 0, 1)),
        ),
        num_heads=2,
    ),
    _chain(
        "130-rows",
        "many rows of two tokens",
        _uniform(2, *(i % 62 for i in range(130))),
        num_heads=2,
    ),
    _chain("n64", "long chains", (Row(4164, 64), Row(150, 20), Row(97, 33)), num_heads=1),
    _tree(
        "n64-9k",
        "a wide tree after a long context, and another tree",
        (Row(9000, 64), Row(65, 60)),
        num_heads=1,
    ),
    *(
        _tree(
            f"{spelling}-spare-capacity",
            "capacities for more nodes and rows than the step has",
            (Row(70, 8), Row(0, 1), Row(40, 5), Row(9, 9)),
            num_heads=3,
            spare=5,
            mask_spelling=spelling,
        )
        for spelling in MaskSpelling
    ),
    _tree(
        "chain-first",
        "a chain together with trees",
        (Row(70, 2), Row(90, 12), Row(80, 9)),
        num_heads=4,
    ),
    *(
        _tree(
            f"scores-{name}",
            "nodes that are not visible, together with very large scores",
            (Row(40, 17), Row(5, 5), Row(3, 2)),
            num_heads=4,
            query_scale=query_scale,
            softmax_scale=scale,
        )
        for name, query_scale, scale in (("large", 1e3, None), ("past-a-sentinel", 1e4, 1.0))
    ),
    *(
        _tree(
            f"blocks-of-{bs}",
            "trees with different block sizes",
            (Row(2 * bs + 20, 13), Row(9, 9)),
            num_heads=3,
            block_size=bs,
        )
        for bs in (1, 3, 128, 256)
    ),
    *(
        _tree(f"heads-{h}", "tiles of nodes and heads", (Row(70, 7), Row(20, 12)), num_heads=h)
        for h in (1, 6, 20, 48)
    ),
    _tree(
        "softmax-scale",
        "the softmax scale is used as given",
        (Row(90, 33), Row(20, 5)),
        num_heads=3,
        query_scale=0.3,
        softmax_scale=0.7,
    ),
    _tree(
        "short-contexts", "more nodes than context tokens", (Row(12, 9), Row(40, 33)), num_heads=2
    ),
    _tree(
        "padded", "a row without draft tokens between trees", (Row(20, 5), Row(0, 0), Row(80, 9))
    ),
    _tree(
        "shared-prefix",
        "draft tokens after blocks that rows share",
        (Row(150, 5), Row(140, 8, shares_prefix_of=0)),
        num_heads=2,
    ),
    _tree(
        "100-nodes",
        "nodes beyond the third word of a mask",
        (Row(140, 100),),
        num_heads=1,
        tree=Tree.CHAIN,
    ),
)
