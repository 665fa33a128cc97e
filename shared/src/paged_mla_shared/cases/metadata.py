"""Cases of plans, whose positions and slots are exact (S-1, S-3)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, TableTail, Tree, in_group
from paged_mla_shared.cases.decode import BLOCK_SIZES
from paged_mla_shared.cases.mixed import CONTINUE_MANY, CONTINUE_ONE, DECODE, FRESH, PADDED
from paged_mla_shared.problem import Mask

GROUP = "metadata"
PRODUCTION = {"keys": 131072, "queries": 600, "rows": 300, "tree": 64, "block ids": 2**16}

_metadata = in_group(GROUP, "S-1", "S-2", "S-3", num_heads=1)

CASES = (
    *(
        _metadata(
            f"bs{bs}",
            "chunks that end at, before and after a block edge",
            tuple(Row(2 * bs + d, bs + d) for d in (-1, 0, 1) if bs + d > 0),
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in BLOCK_SIZES
    ),
    _metadata(
        "mixed",
        "positions of a continued chunk start at its cached length",
        (CONTINUE_ONE, FRESH, PADDED, DECODE, CONTINUE_MANY),
    ),
    _metadata(
        "tree",
        "positions follow a node's depth, and slots its index",
        (Row(70, 8), Row(5, 5)),
        mask=Mask.TREE,
    ),
    *(
        _metadata(
            f"tree-{tree}",
            "depths of very deep and very flat trees",
            (Row(130, 64), Row(0, 2), Row(40, 40)),
            mask=Mask.TREE,
            tree=tree,
        )
        for tree in (Tree.CHAIN, Tree.STAR, Tree.FOREST)
    ),
    *(
        _metadata(
            f"bs{bs}",
            "chunks with block sizes that are not powers of two",
            tuple(Row(3 * bs + d, bs + d) for d in (-1, 0, 1)),
            block_size=bs,
        )
        for bs in (3, 48, 100)
    ),
    _metadata(
        "spare-capacity",
        "capacities far larger than the step",
        (Row(70, 9), Row(0, 1), Row(200, 1)),
        padded_tokens=3,
        spare=9,
    ),
    _metadata(
        "tree-padded",
        "padded rows and tokens together with trees",
        (Row(0, 3), Row(70, 12), Row(9, 0), Row(40, 7)),
        mask=Mask.TREE,
        padded_tokens=5,
    ),
    *(
        _metadata(
            f"non-causal-short-bs{bs}",
            "queries before a row's first position have neither a position nor a slot",
            (Row(1, 3), Row(70, 2), Row(3, 5), Row(bs, bs + 1), Row(bs + 1, bs + 2), Row(0, 4)),
            block_size=bs,
            mask=Mask.NON_CAUSAL,
        )
        for bs in (1, 16, 64)
    ),
    _metadata("padded-rows", "padded rows have no slot", (Row(0, 3), Row(70, 2), Row(0, 1))),
    _metadata(
        "padded-tokens", "padded tokens have no slot", (Row(70, 2), Row(3, 1)), padded_tokens=5
    ),
    *(
        _metadata(
            f"tail-{tail}",
            "unused table entries give no slot",
            (Row(64, 64), Row(1, 1)),
            table_tail=tail,
        )
        for tail in TableTail
    ),
    _metadata(
        "many-rows", "prefix sums over many rows", tuple(Row(5 + i, 1 + i % 4) for i in range(40))
    ),
    _metadata(
        "300-rows",
        "more than 256 rows with short queries of all lengths",
        tuple(Row(7 + 3 * i, i % 9) for i in range(300)),
    ),
    _metadata(
        "positions-past-2-16",
        "positions around and far above 2^16",
        (Row(65535, 1), Row(65537, 3), Row(131072, 2)),
    ),
    _metadata("600-queries", "a long chunk after a context", (Row(4696, 600), Row(70, 1))),
    _metadata(
        "blocks-past-2-16",
        "block ids of more than 16 bits",
        (Row(130, 3), Row(9, 9)),
        block_size=1,
        cache_blocks=2**16 + 500,
    ),
    _metadata(
        "tree-64",
        "depths in trees wider than a word, after contexts",
        (Row(4100, 64), Row(0, 3), Row(64, 64), Row(300, 33)),
        mask=Mask.TREE,
    ),
)
