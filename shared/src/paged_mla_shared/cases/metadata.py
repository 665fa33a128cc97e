"""Positions and slots, exactly (S-1, S-3)."""

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
            "a chunk that ends on, before and after a block edge",
            tuple(Row(2 * bs + d, bs + d) for d in (-1, 0, 1) if bs + d > 0),
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in BLOCK_SIZES
    ),
    _metadata(
        "mixed",
        "a continued chunk counts from its cached length",
        (CONTINUE_ONE, FRESH, PADDED, DECODE, CONTINUE_MANY),
    ),
    _metadata(
        "tree", "positions follow depth, slots the index", (Row(70, 8), Row(5, 5)), mask=Mask.TREE
    ),
    *(
        _metadata(
            f"tree-{tree}",
            "depths of a tree as deep, and as flat, as its nodes allow",
            (Row(130, 64), Row(0, 2), Row(40, 40)),
            mask=Mask.TREE,
            tree=tree,
        )
        for tree in (Tree.CHAIN, Tree.STAR, Tree.FOREST)
    ),
    *(
        _metadata(
            f"bs{bs}",
            "a chunk over blocks of no power of two",
            tuple(Row(3 * bs + d, bs + d) for d in (-1, 0, 1)),
            block_size=bs,
        )
        for bs in (3, 48, 100)
    ),
    _metadata(
        "spare-capacity",
        "an instance far larger than its step",
        (Row(70, 9), Row(0, 1), Row(200, 1)),
        padded_tokens=3,
        spare=9,
    ),
    _metadata(
        "tree-padded",
        "padded rows and tokens beside trees",
        (Row(0, 3), Row(70, 12), Row(9, 0), Row(40, 7)),
        mask=Mask.TREE,
        padded_tokens=5,
    ),
    *(
        _metadata(
            f"non-causal-short-bs{bs}",
            "queries in front of a row's first position have neither position nor slot",
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
        _metadata(f"tail-{tail}", "tails give no slot", (Row(64, 64), Row(1, 1)), table_tail=tail)
        for tail in TableTail
    ),
    _metadata(
        "many-rows", "prefix sums over many rows", tuple(Row(5 + i, 1 + i % 4) for i in range(40))
    ),
    _metadata(
        "300-rows",
        "rows past 255, of every short query length",
        tuple(Row(7 + 3 * i, i % 9) for i in range(300)),
    ),
    _metadata(
        "positions-past-2-16",
        "positions around and far past 16 bits",
        (Row(65535, 1), Row(65537, 3), Row(131072, 2)),
    ),
    _metadata("600-queries", "a long chunk behind a context", (Row(4696, 600), Row(70, 1))),
    _metadata(
        "blocks-past-2-16",
        "block ids of more than 16 bits",
        (Row(130, 3), Row(9, 9)),
        block_size=1,
        cache_blocks=2**16 + 500,
    ),
    _metadata(
        "tree-64",
        "depths of trees wider than a word, behind contexts",
        (Row(4100, 64), Row(0, 3), Row(64, 64), Row(300, 33)),
        mask=Mask.TREE,
    ),
)
