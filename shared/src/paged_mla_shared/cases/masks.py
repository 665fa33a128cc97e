"""The spellings of one mask, and no causal mask at all."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row
from paged_mla_shared.problem import Mask, MaskSpelling

GROUP = "masks"

_TREES = (Row(70, 8), Row(3, 3), Row(140, 12))

CASES = (
    *(
        Case(
            group=GROUP,
            name=f"tree-{spelling}",
            why="the mask's memory layout",
            rules=("S-4", "S-14"),
            rows=_TREES,
            num_heads=8,
            mask=Mask.TREE,
            mask_spelling=spelling,
        )
        for spelling in MaskSpelling
    ),
    *(
        Case(
            group=GROUP,
            name=f"tree-{spelling}-ragged-padded",
            why="rows without queries must not shift the mask of the next",
            rules=("S-4", "S-14"),
            rows=(Row(0, 0), Row(66, 2), Row(40, 0), Row(50, 11), Row(64, 1)),
            num_heads=5,
            mask=Mask.TREE,
            mask_spelling=spelling,
        )
        for spelling in MaskSpelling
    ),
    Case(
        group=GROUP,
        name="non-causal-edges",
        why="without a causal mask the boundary is the row's length, not the tile's",
        rules=("S-4",),
        rows=(Row(1, 1), Row(63, 3), Row(64, 4), Row(65, 5), Row(130, 9)),
        num_heads=6,
        mask=Mask.NON_CAUSAL,
    ),
    Case(
        group=GROUP,
        name="non-causal-prompt",
        why="early queries see later keys of their own chunk",
        rules=("S-4",),
        rows=(Row(70, 70), Row(90, 20)),
        num_heads=4,
        mask=Mask.NON_CAUSAL,
    ),
)
