"""Cases with one query token per row: all head counts, block sizes and edges of lengths."""

from __future__ import annotations

from typing import Any

from paged_mla_shared.cases.case import Case, Row

GROUP = "decode"
PRODUCTION = {
    "keys": 2**16,
    "rows": 300,
    "row blocks": 2**16,
    "heads": 128,
    "pairs": 16384,
    "least scale": 0.001,
    "most scale": 1000.0,
}

HEADS = (1, 2, 3, 6, 8, 9, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128)
BLOCK_SIZES = (1, 16, 32, 64, 128, 256)


def block_edges(block_size: int) -> tuple[int, ...]:
    """Return 1, and the lengths at, before and after the first two block edges."""
    edges = {1} | {k * block_size + d for k in (1, 2) for d in (-1, 0, 1)}
    return tuple(sorted(n for n in edges if n > 0))


def _decode(
    name: str,
    why: str,
    seq_lens: tuple[int, ...],
    **more: Any,
) -> Case:
    """Return a case of the group; `more` are fields of :class:`Case`."""
    return Case(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-1", "S-4", "S-5", "S-7", "S-9"),
        rows=tuple(Row(n, 1) for n in seq_lens),
        **more,
    )


CASES = (
    *(
        _decode(
            f"h{h}",
            "head counts that are not multiples of a tile",
            (1, 64, 65, 130),
            num_heads=h,
            fixed=("num_heads",),
        )
        for h in HEADS
    ),
    *(
        _decode(
            f"bs{bs}",
            "lengths around the edges of this block size",
            block_edges(bs),
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in BLOCK_SIZES
    ),
    *(
        _decode(
            f"sweep-bs{bs}",
            "all lengths up to two blocks and one token",
            tuple(range(1, 2 * bs + 2)),
            num_heads=2,
            block_size=bs,
            fixed=("block_size",),
        )
        for bs in (16, 64)
    ),
    _decode("b1-long", "one row that many programs share", (2000,)),
    _decode(
        "one-long-many-short",
        "the number of splits depends on each row's own length",
        (1500, 1, 2, 3, 1, 64),
    ),
    _decode("h128-2k", "many heads and many key tiles", (2100, 70), num_heads=128),
    _decode("b33", "more rows than a power of two", tuple(3 + 5 * i for i in range(33))),
    _decode(
        "scores-large",
        "scores of thousands must not overflow or be clipped by a sentinel",
        (1, 63, 200),
        query_scale=1e3,
    ),
    _decode(
        "scores-past-a-sentinel",
        "a row whose scores are all below -5e4 is not a masked row",
        (1, 1, 2, 63, 200),
        query_scale=1e4,
        softmax_scale=1.0,
    ),
    _decode(
        "scores-below-zero",
        "heads that see a few keys, all with scores far below 0",
        (2, 2, 3, 2, 3),
        num_heads=16,
        query_scale=5.0,
    ),
    _decode("scores-tiny", "nearly equal weights", (1, 63, 200), query_scale=1e-3),
    _decode(
        "softmax-scale",
        "a softmax scale that no kernel has as its default",
        (1, 65, 130),
        softmax_scale=0.3,
    ),
    *(
        _decode(
            f"bs{bs}",
            "block sizes that are not powers of two",
            (*block_edges(bs), 5 * bs + 1),
            num_heads=3,
            block_size=bs,
        )
        for bs in (3, 17, 48, 100, 192)
    ),
    *(
        _decode(
            f"bs{bs}",
            "block sizes that engines use for hybrid models",
            (1, 300, bs - 1, bs + 1),
            num_heads=3,
            block_size=bs,
        )
        for bs in (480, 1056)
    ),
    *(
        _decode(
            f"latents-{scale:g}",
            "latents far smaller or larger than 1",
            (1, 65, 130),
            num_heads=3,
            query_scale=1 / scale,
            latent_scale=scale,
        )
        for scale in (1e-2, 200.0)
    ),
    _decode(
        "spare-capacity", "capacities far larger than the step", (1, 65, 700), num_heads=8, spare=9
    ),
    *(
        _decode(
            f"softmax-scale-{scale:g}",
            "the softmax scale is used as given, also if it is very small or large",
            (1, 65, 130),
            num_heads=3,
            query_scale=0.1 / scale,
            softmax_scale=scale,
        )
        for scale in (1e-3, 0.017, 2.5, 40.0, 1e3)
    ),
    _decode(
        "33k-keys",
        "a few late keys with nearly all the weight, and a short row",
        (33001, 5),
        num_heads=1,
        query_scale=8,
    ),
    _decode(
        "33k-keys-h16",
        "a long context in every format, and a short context",
        (33001, 700),
        num_heads=16,
        is_large=True,
    ),
    _decode(
        "bs1-66k-keys",
        "a row of more than 2^16 blocks of one token, and a short row",
        (66000, 700),
        num_heads=1,
        block_size=1,
        is_slow=True,
    ),
    _decode("2500-keys", "a row of more than 2048 keys, and a short row", (2500, 5), num_heads=1),
    _decode(
        "300-rows",
        "more than 256 rows, and more than 16384 pairs of token and head",
        tuple(1 + (7 * i) % 97 for i in range(300)),
        num_heads=64,
    ),
    _decode(
        "tiles-1-to-16",
        "rows that end at, before and after each edge of 16 key tiles",
        tuple(64 * k + d for k in range(1, 17) for d in (-1, 0, 1)),
        num_heads=1,
    ),
)
