"""Numbered cases of production sizes. A number defines a case, so that each can run again.

Each case is large in one way and random in all others. The work for a case is bounded.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from paged_mla_shared.cases.case import Case, Row, SlotOrder, TableTail, Tree
from paged_mla_shared.problem import Mask, MaskSpelling, Rope, RopePairing, Yarn

_LONGEST = 33_000
_MOST_WORK = 4_000_000  # sum of keys times pairs of token and head over all steps
_HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 40, 64, 128)
_BLOCK_SIZES = (64, 64, 16, 32, 128, 1, 256, 48)
_EDGES = (-1, 0, 1, 2)
_STEPS = (1, 1, 2, 3, 4)
_SLOT_ORDERS = [order for order in SlotOrder if order is not SlotOrder.TABLE]  # equal to no slots


def production_case(number: int) -> Case:
    """Return case `number`; case `number` is large in way ``number % len(WAYS)``."""
    rng = random.Random(f"production {number}")
    way = WAYS[number % len(WAYS)]
    mask = rng.choice([Mask.CAUSAL, Mask.CAUSAL, Mask.NON_CAUSAL])
    more = rng.choice(_STEPS) - 1
    again = 0.0 if way is many_pairs else 0.3
    steps = [way(rng), *(way(rng) if rng.random() < again else small(rng) for _ in range(more))]
    rng.shuffle(steps)
    scale = rng.choice((None, None, 10 ** rng.uniform(-3, 3)))
    return Case(
        group="fuzz",
        name=f"production-{number}",
        why=(way.__doc__ or "").removeprefix("Draw ").rstrip("."),
        rules=("S-17", "S-19"),
        rows=steps[0],
        then=tuple(steps[1:]),
        num_heads=_heads(rng, steps, many=way is many_pairs),
        block_size=rng.choice(_BLOCK_SIZES),
        mask=Mask.TREE if way is wide_trees else mask,
        mask_spelling=rng.choice(list(MaskSpelling)),
        tree=rng.choice(list(Tree)),
        rope=_rope(rng) if way is far_positions or rng.random() < 0.4 else None,
        padded_tokens=rng.choice((0, 0, 3, 17, 520)),
        query_scale=rng.choice((1.0, 8.0)) if scale is None else min(0.2 / scale, 100.0),
        softmax_scale=scale,
        table_tail=rng.choice(list(TableTail)),
        table_width=rng.choice((0, 3, 40)),
        packed_padding=rng.choice((0, 0, 3)),
        spare=rng.choice((1, 1, 4)),
        token_padding=rng.choice((0, 0, 32)),
        block_padding=rng.choice((0, 0, 96)),
        strided_inputs=rng.random() < 0.25,
        explicit_slots=way is many_tokens,
        slot_order=rng.choice(_SLOT_ORDERS),
        cache_blocks=2**16 + 999 if way is high_blocks else 0,
    )


def long_rows(rng: random.Random) -> tuple[Row, ...]:
    """Draw rows of up to 33 k keys with a few query tokens each."""
    rows = [_row(_long(rng), rng.choice((1, 1, 2, 3, 5, 6, 7, 8)))]
    if rng.random() < 0.4:
        rows.append(_row(_long(rng) // 3 + 2100, rng.choice((2, 3, 5, 8))))
    return _mixed(rng, [*rows, *_short(rng, rng.randint(0, 3))])


def longest_rows(rng: random.Random) -> tuple[Row, ...]:
    """Draw a row of about 2^15 keys, and other rows."""
    row = _row(rng.choice((32767, 32768, 32769, _LONGEST)), rng.choice((1, 2, 5)))
    return _mixed(rng, [row, *_short(rng, 2)])


def many_rows(rng: random.Random) -> tuple[Row, ...]:
    """Draw 65 to 300 rows, some of which may be padded."""
    count, most = rng.choice((65, 129, 257, 300)), rng.choice((1, 3, 7))
    padded = rng.choice((0, 0.1, 0.3))
    return tuple(
        Row(0, rng.randint(0, 2))
        if rng.random() < padded
        else _row(rng.randint(1, 130), rng.randint(1, most))
        for _ in range(count)
    )


def long_chunks(rng: random.Random) -> tuple[Row, ...]:
    """Draw a chunk of up to 600 query tokens after a context, and other rows."""
    chunk = _row(rng.randint(1, 2100), rng.choice((257, 511, 513, 600, rng.randint(250, 600))))
    return _mixed(rng, [chunk, *_short(rng, rng.choice((1, 3, 40)))])


def many_tokens(rng: random.Random) -> tuple[Row, ...]:
    """Draw more than 512 tokens that are written to explicit slots."""
    return _mixed(rng, [_row(rng.randint(0, 900), rng.randint(513, 600)), *_short(rng, 2)])


def wide_trees(rng: random.Random) -> tuple[Row, ...]:
    """Draw draft trees of up to 64 nodes after contexts, and padded rows between them."""
    rows = [_row(rng.choice((0, 70, 900, 4100)), rng.choice((33, 48, 63, 64))) for _ in range(2)]
    small = [_row(rng.randint(0, 140), rng.randint(1, 12)) for _ in range(rng.randint(0, 4))]
    padded = [Row(0, rng.randint(0, 4)) for _ in range(rng.randint(0, 2))]
    return _mixed(rng, [*rows, *small, *padded])


def many_pairs(rng: random.Random) -> tuple[Row, ...]:
    """Draw more than 16384 pairs of token and head."""
    return _mixed(rng, [_row(rng.randint(130, 160), 130), *_short(rng, 2)])


def high_blocks(rng: random.Random) -> tuple[Row, ...]:
    """Draw short rows whose block ids have more than 16 bits."""
    return small(rng)


def far_positions(rng: random.Random) -> tuple[Row, ...]:
    """Draw positions around and above 2^16."""
    length = rng.choice((65535, 65536, 65537, 70000))
    return _mixed(rng, [_row(length, rng.choice((1, 2))), *_short(rng, 1)])


def edges(rng: random.Random) -> tuple[Row, ...]:
    """Draw rows of up to 40 key tiles that end near the edges of tiles."""
    tiles = rng.sample(range(1, 41), 6)
    return tuple(_row(64 * k + rng.choice(_EDGES), rng.choice((1, 1, 3, 8))) for k in tiles)


def small(rng: random.Random) -> tuple[Row, ...]:
    """Draw a few short rows of any kind."""
    return _mixed(rng, _short(rng, rng.randint(1, 6)))


WAYS: tuple[Callable[[random.Random], tuple[Row, ...]], ...] = (
    long_rows,
    many_rows,
    wide_trees,
    long_chunks,
    edges,
    many_pairs,
    longest_rows,
    many_tokens,
    high_blocks,
    far_positions,
)


def _row(length: int, query_len: int) -> Row:
    """Return a row of `query_len` query tokens with `length` keys, or more if it needs them."""
    return Row(max(length, query_len), query_len)


def _long(rng: random.Random) -> int:
    """Return a length; each power of two is as likely as the next, and half are at an edge."""
    length = int(2 ** rng.uniform(11, 15))
    if rng.random() < 0.5:
        length = length // 64 * 64 + rng.choice(_EDGES)
    return min(length, _LONGEST)


def _short(rng: random.Random, count: int) -> list[Row]:
    """Return rows of up to 140 keys: decode rows, drafts, chunks, prompts and padded rows."""
    found = []
    for _ in range(count):
        query_len = rng.choice((1, 1, 1, 2, 3, 5, 6, 7, 8, 20, 0))
        padded = rng.random() < 0.1
        found.append(Row(0, 1) if padded else _row(rng.randint(1, 140), query_len))
    return found


def _mixed(rng: random.Random, rows: list[Row]) -> tuple[Row, ...]:
    rng.shuffle(rows)
    return tuple(rows)


def _heads(rng: random.Random, steps: list[tuple[Row, ...]], *, many: bool) -> int:
    """Return a head count that keeps the work bounded."""
    work = sum(row.seq_len * row.query_len for step in steps for row in step)
    if many:
        return 128
    fitting = [h for h in _HEADS if h * work <= _MOST_WORK]
    return rng.choice(fitting or _HEADS[:1])


def _rope(rng: random.Random) -> Rope:
    yarn = rng.choice(
        (None, Yarn(40.0, 4096), Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=0.707), Yarn(4.0, 64))
    )
    return Rope(rng.choice(list(RopePairing)), rng.choice((1e4, 5e4, 1e6)), yarn)
