"""Cases of caches with more than 2^31 or 2^32 elements; live blocks are at the end (S-1)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Row, in_group

GROUP = "large_offsets"
PRODUCTION = {"block ids": 2**24}

_SIZES = (("2g", 2**31), ("4g", 2**32))

_large = in_group(GROUP, "S-1", "S-9", "S-10", num_heads=16, features=("large_offsets",))

CASES = (
    *(
        _large(
            f"{size}-{name}",
            "32-bit offsets wrap at 2^31 or at 2^32 elements",
            rows,
            block_size=block_size,
            cache_elements=elements + 2**24,
        )
        for size, elements in _SIZES
        for name, rows, block_size in (
            ("decode", (Row(65, 1), Row(130, 1)), 64),
            ("extend", (Row(100, 30), Row(1, 1)), 64),
            ("bs1", (Row(20, 2), Row(7, 1)), 1),
        )
    ),
    _large(
        "blocks-past-2-24",
        "block ids of more than 24 bits",
        (Row(20, 2), Row(7, 1)),
        block_size=1,
        cache_blocks=2**24 + 500,
    ),
)
