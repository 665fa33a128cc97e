"""Cases of tree masks in all memory layouts, and of non-causal masks."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing

GROUP = "masks"
PRODUCTION = {"keys": 33000, "queries": 64, "rows": 300, "tree": 64}

_TREES = (Row(70, 8), Row(3, 3), Row(140, 12))


def _masked(mask: Mask = Mask.TREE, rules: tuple[str, ...] = ("S-4", "S-14"), **more: Any) -> Case:
    """Return a case of the group, by default with a tree mask; `more` are fields of Case."""
    return Case(group=GROUP, mask=mask, rules=rules, **more)


CASES = (
    *(
        _masked(
            name=f"tree-{spelling}",
            why="the memory layout of the mask",
            rows=_TREES,
            num_heads=8,
            mask_spelling=spelling,
        )
        for spelling in MaskSpelling
    ),
    *(
        _masked(
            name=f"tree-{spelling}-ragged-padded",
            why="rows without queries must not shift the mask of the next",
            rows=(Row(0, 0), Row(66, 2), Row(40, 0), Row(50, 11), Row(64, 1)),
            num_heads=5,
            mask_spelling=spelling,
        )
        for spelling in MaskSpelling
    ),
    *(
        _masked(
            name=f"tree-{spelling}-64",
            why="wide trees after contexts, and padded rows of several tokens",
            rows=(Row(0, 3), Row(4164, 64), Row(0, 1), Row(33, 33), Row(130, 65), Row(64, 60)),
            num_heads=1,
            mask_spelling=spelling,
            tree=tree,
            padded_tokens=5,
        )
        for spelling, tree in zip(MaskSpelling, (Tree.RANDOM, Tree.CHAIN, Tree.RANDOM), strict=True)
    ),
    *(
        _masked(
            name=f"tree-{spelling}-far-node",
            why="a leaf that sees the nodes of the last bits of each word",
            rows=(Row(64, 64), Row(40, 32)),
            num_heads=2,
            mask_spelling=spelling,
            tree=Tree.CHAIN,
        )
        for spelling in MaskSpelling
    ),
    *(
        _masked(
            name=f"tree-{spelling}-33k",
            why="a mask after more than 2^15 keys, and the masks of later rows",
            rows=(Row(33010, 40), Row(0, 2), Row(70, 64)),
            num_heads=1,
            mask_spelling=spelling,
        )
        for spelling in (MaskSpelling.FULL, MaskSpelling.PACKED)
    ),
    *(
        _masked(
            name=f"tree-{spelling}-h{heads}-bs{block_size}",
            why="masks with several heads in a tile, and other block sizes",
            rows=(Row(50, 9), Row(0, 1), Row(200, 5), Row(17, 17)),
            num_heads=heads,
            block_size=block_size,
            mask_spelling=spelling,
        )
        for spelling, heads, block_size in zip(
            (*MaskSpelling, *MaskSpelling),
            (3, 20, 40, 24, 2, 12),
            (1, 16, 32, 48, 128, 256),
            strict=True,
        )
    ),
    *(
        _masked(
            name=f"non-causal-{name}",
            why="only the row's length limits the keys, with other block sizes",
            rules=("S-4",),
            rows=(Row(5, 5), Row(0, 1), Row(300, 20), Row(70, 1)),
            num_heads=heads,
            block_size=block_size,
            mask=Mask.NON_CAUSAL,
            query_scale=scale,
        )
        for name, heads, block_size, scale in (
            ("bs1", 2, 1, 1.0),
            ("bs256", 20, 256, 1.0),
            ("scores-large", 3, 48, 1e3),
        )
    ),
    _masked(
        name="non-causal-softmax-scale",
        why="the softmax scale is used as given, also with views and a cache with gaps",
        rules=("S-4", "S-5"),
        rows=(Row(90, 33), Row(300, 1), Row(20, 5)),
        num_heads=3,
        mask=Mask.NON_CAUSAL,
        query_scale=0.3,
        softmax_scale=0.7,
        token_padding=32,
        strided_inputs=True,
    ),
    _masked(
        name="non-causal-steps",
        why="steps with rows of other lengths on one runner",
        rules=("S-4", "S-17"),
        rows=(Row(90, 33), Row(20, 5)),
        then=((Row(300, 5), Row(0, 1), Row(7, 7)), (Row(3, 1), Row(64, 40))),
        num_heads=3,
        mask=Mask.NON_CAUSAL,
    ),
    _masked(
        name="non-causal-padded",
        why="all keys of rows are seen, together with padded rows and tokens",
        rules=("S-4", "S-6"),
        rows=(Row(0, 2), Row(4200, 3), Row(5, 5), Row(0, 0), Row(130, 40)),
        num_heads=1,
        mask=Mask.NON_CAUSAL,
        padded_tokens=7,
    ),
    *(
        _masked(
            name=f"non-causal-short-{name}",
            why="rows with fewer keys than queries, all of which see every key, and other rows",
            rules=("S-2", "S-4"),
            rows=rows,
            num_heads=heads,
            block_size=block_size,
            mask=Mask.NON_CAUSAL,
        )
        for name, rows, heads, block_size in (
            ("1-key-3-queries", (Row(1, 3),), 2, 1),
            ("3-keys-5-queries", (Row(70, 1), Row(3, 5), Row(5, 5), Row(0, 2)), 6, 64),
            ("behind-a-block", (Row(65, 66), Row(17, 18), Row(300, 2)), 3, 16),
            ("many-queries", (Row(130, 140), Row(1, 90), Row(64, 65), Row(2, 2)), 4, 64),
        )
    ),
    _masked(
        name="non-causal-short-rope",
        why="queries before a row's first position are rotated by position 0",
        rules=("S-2", "S-3", "S-4", "S-12"),
        rows=(Row(66, 2), Row(3, 5), Row(15, 16), Row(40, 20)),
        num_heads=4,
        block_size=16,
        mask=Mask.NON_CAUSAL,
        rope=Rope(RopePairing.NEOX),
    ),
    _masked(
        name="non-causal-short-steps",
        why="rows with fewer keys than queries replace other rows between steps, and vice versa",
        rules=("S-2", "S-4", "S-17"),
        rows=(Row(90, 33), Row(3, 5)),
        then=((Row(2, 5), Row(65, 66), Row(7, 7)), (Row(64, 40), Row(0, 1), Row(30, 6))),
        num_heads=3,
        mask=Mask.NON_CAUSAL,
    ),
    _masked(
        name="tree-packed-wide-lines",
        why="packed lines that are wider than their nodes need, as in engines that use words",
        rules=("S-9", "S-14"),
        rows=(Row(70, 8), Row(0, 2), Row(140, 12)),
        num_heads=4,
        mask_spelling=MaskSpelling.PACKED,
        packed_padding=6,
    ),
    _masked(
        name="tree-full-300-rows",
        why="the start of a row's mask after many rows, some of which are padded",
        rows=tuple(Row(0 if i % 9 in {1, 4, 5} else 20 + i % 40, 1 + i % 4) for i in range(300)),
        num_heads=1,
        mask_spelling=MaskSpelling.FULL,
        is_slow=True,
    ),
    _masked(
        name="non-causal-edges",
        why="without a causal mask the boundary is the row's length, not the tile's",
        rules=("S-4",),
        rows=(Row(1, 1), Row(63, 3), Row(64, 4), Row(65, 5), Row(130, 9)),
        num_heads=6,
        mask=Mask.NON_CAUSAL,
    ),
    _masked(
        name="non-causal-prompt",
        why="early queries see later keys of their own chunk",
        rules=("S-4",),
        rows=(Row(70, 70), Row(90, 20)),
        num_heads=4,
        mask=Mask.NON_CAUSAL,
    ),
)
