"""Cases of gathers, which read a row's cached latents for up-projection (S-1, S-9)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "gather"
PRODUCTION = {"keys": 33000, "queries": 600, "rows": 300}

_gather = in_group(GROUP, "S-1", "S-9", num_heads=1)

CASES = (
    *(
        _gather(
            f"bs{bs}",
            "rows that do not end at a block edge",
            (Row(bs + 3, 2), Row(7, 7)),
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in (1, 16, 64, 256)
    ),
    _gather("no-hit", "no row has a context", (Row(5, 5), Row(9, 9))),
    _gather("empty-rows", "padded rows contribute nothing", (Row(0, 0), Row(70, 1), Row(0, 0))),
    *(
        _gather(
            f"bs{bs}",
            "block sizes that are not powers of two",
            (Row(4 * bs + 1, 2), Row(7, 7)),
            block_size=bs,
        )
        for bs in (3, 48)
    ),
    _gather(
        "bs1056", "blocks of more than 256 tokens", (Row(1060, 2), Row(300, 1)), block_size=1056
    ),
    _gather(
        "long-chunks",
        "many new tokens after the context",
        (Row(700, 600), Row(0, 2), Row(90, 64), Row(130, 59)),
    ),
    _gather(
        "strided",
        "a cache with gaps, and a block table that is a view",
        (Row(140, 4), Row(9, 1)),
        token_padding=32,
        block_padding=64,
        strided_inputs=True,
    ),
    _gather(
        "again",
        "steps with longer, shorter and other rows on one runner",
        (Row(70, 1), Row(9, 1)),
        then=((Row(700, 1),), (Row(0, 0), Row(5, 5), Row(64, 1)), (Row(70, 1), Row(9, 1))),
        spare=3,
    ),
    _gather("shared", "rows that share blocks", (Row(140, 4), Row(131, 2, shares_prefix_of=0))),
    _gather(
        "300-rows-33k",
        "offsets of many rows, one of which is long",
        (*(Row(i % 23, i % 2) for i in range(200)), Row(33001, 1), *(Row(3, 1) for _ in range(99))),
    ),
    *(
        _gather(
            f"{size}-elements",
            "32-bit offsets wrap at 2^31 or at 2^32 elements",
            (Row(65, 1), Row(130, 2)),
            cache_elements=elements + 2**24,
        )
        for size, elements in (("2g", 2**31), ("4g", 2**32))
    ),
    _gather(
        "65600-keys", "a row longer than a workspace of 2^16 tokens", (Row(65600, 1), Row(3, 1))
    ),
    _gather("no-keys", "no row has any token", (Row(0, 1),)),
)
