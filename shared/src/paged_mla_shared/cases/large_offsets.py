"""Caches whose elements do not fit 31 or 32 bits; live blocks lie at the very top (S-1)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row

GROUP = "large_offsets"

_SIZES = (("2g", 2**31), ("4g", 2**32))


def _large(name: str, elements: int, rows: tuple[Row, ...], block_size: int) -> Case:
    return Case(
        group=GROUP,
        name=name,
        why="offsets kept in 32 bits wrap, at 2^31 or at 2^32 elements",
        rules=("S-1", "S-9", "S-10"),
        rows=rows,
        num_heads=16,
        block_size=block_size,
        cache_elements=elements + 2**24,
    )


CASES = tuple(
    _large(f"{size}-{name}", elements, rows, block_size)
    for size, elements in _SIZES
    for name, rows, block_size in (
        ("decode", (Row(65, 1), Row(130, 1)), 64),
        ("extend", (Row(100, 30), Row(1, 1)), 64),
        ("bs1", (Row(20, 2), Row(7, 1)), 1),
    )
)
