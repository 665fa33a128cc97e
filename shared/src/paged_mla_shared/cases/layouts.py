"""Memory that is not dense, and tables whose tails lie (S-9)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, TableTail, in_group
from paged_mla_shared.problem import Mask, MaskSpelling

GROUP = "layouts"
PRODUCTION = {"keys": 33000}

_ROWS = (Row(1, 1), Row(64, 3), Row(65, 1), Row(150, 20))
_DECODE = (Row(1, 1), Row(65, 1), Row(150, 1))

_layout = in_group(GROUP, "S-1", "S-9", rows=_ROWS, num_heads=6)

CASES = (
    _layout("block-padding", "blocks further apart than they are long", block_padding=256),
    _layout("token-padding", "tokens further apart than they are long", token_padding=64),
    _layout(
        "both-paddings", "a cache cut out of a larger pool", token_padding=32, block_padding=96
    ),
    _layout("decode-block-padding", "block padding, decode only", rows=_DECODE, block_padding=256),
    _layout("decode-token-padding", "token padding, decode only", rows=_DECODE, token_padding=64),
    _layout(
        "bs16-block-padding",
        "padded small blocks",
        block_size=16,
        block_padding=64,
        fixed=("block_size",),
    ),
    _layout("strided-inputs", "queries, latents and table as views", strided_inputs=True),
    _layout(
        "strided-everything",
        "no dense array anywhere",
        token_padding=32,
        block_padding=32,
        strided_inputs=True,
    ),
    *(
        _layout(f"tail-{tail}", "table entries past a row's last block", table_tail=tail)
        for tail in TableTail
    ),
    _layout(
        "33k-strided",
        "padded blocks and strided inputs of a long row beside many",
        rows=(Row(33001, 1), *(Row(1 + i % 60, 1) for i in range(40))),
        token_padding=32,
        block_padding=32,
        strided_inputs=True,
        table_width=0,
        num_heads=1,
    ),
    _layout(
        "strided-tree",
        "views beside a mask",
        rows=(Row(70, 8), Row(140, 12)),
        token_padding=32,
        strided_inputs=True,
        mask=Mask.TREE,
    ),
    *(
        _layout(
            f"strided-tree-{spelling}",
            "a mask as a view",
            rows=(Row(70, 8), Row(0, 1), Row(40, 12)),
            num_heads=2,
            strided_inputs=True,
            mask=Mask.TREE,
            mask_spelling=spelling,
        )
        for spelling in (MaskSpelling.FULL, MaskSpelling.PACKED)
    ),
    _layout("wide-table", "a table far wider than any row", table_width=300),
    _layout("exact-table", "no column past the longest row", table_width=0),
)
