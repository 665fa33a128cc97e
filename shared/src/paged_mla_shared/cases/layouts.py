"""Cases of memory that is not contiguous, and of invalid unused table entries (S-9)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, TableTail, in_group
from paged_mla_shared.problem import Mask, MaskSpelling

GROUP = "layouts"
PRODUCTION = {"keys": 33000}

_ROWS = (Row(1, 1), Row(64, 3), Row(65, 1), Row(150, 20))
_DECODE = (Row(1, 1), Row(65, 1), Row(150, 1))

_layout = in_group(GROUP, "S-1", "S-9", rows=_ROWS, num_heads=6)

CASES = (
    _layout("block-padding", "a block stride that is larger than a block", block_padding=256),
    _layout("token-padding", "a token stride that is larger than a token", token_padding=64),
    _layout(
        "both-paddings",
        "a cache that is a view of a larger pool",
        token_padding=32,
        block_padding=96,
    ),
    _layout("decode-block-padding", "block padding, decode only", rows=_DECODE, block_padding=256),
    _layout("decode-token-padding", "token padding, decode only", rows=_DECODE, token_padding=64),
    _layout(
        "bs16-block-padding",
        "small blocks with padding",
        block_size=16,
        block_padding=64,
        fixed=("block_size",),
    ),
    _layout(
        "strided-inputs", "queries, latents and block table that are views", strided_inputs=True
    ),
    _layout(
        "strided-everything",
        "no array is contiguous",
        token_padding=32,
        block_padding=32,
        strided_inputs=True,
    ),
    *(
        _layout(
            f"tail-{tail}",
            "the table entries after a row's last block are not used",
            table_tail=tail,
        )
        for tail in TableTail
    ),
    _layout(
        "33k-strided",
        "padded blocks and strided inputs, with a long row and many short rows",
        rows=(Row(33001, 1), *(Row(1 + i % 60, 1) for i in range(40))),
        token_padding=32,
        block_padding=32,
        strided_inputs=True,
        table_width=0,
        num_heads=1,
    ),
    _layout(
        "strided-tree",
        "views together with a mask",
        rows=(Row(70, 8), Row(140, 12)),
        token_padding=32,
        strided_inputs=True,
        mask=Mask.TREE,
    ),
    *(
        _layout(
            f"strided-tree-{spelling}",
            "a mask that is a view",
            rows=(Row(70, 8), Row(0, 1), Row(40, 12)),
            num_heads=2,
            strided_inputs=True,
            mask=Mask.TREE,
            mask_spelling=spelling,
        )
        for spelling in (MaskSpelling.FULL, MaskSpelling.PACKED)
    ),
    _layout("wide-table", "a block table far wider than any row needs", table_width=300),
    _layout("exact-table", "a block table without columns after the longest row", table_width=0),
)
