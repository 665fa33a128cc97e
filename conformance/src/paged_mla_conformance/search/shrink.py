"""Make a failing case smaller: fewer steps, fewer rows, shorter rows and plain settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from paged_mla_shared.cases.case import Case, Row

MOST_TRIES = 60

_PLAIN = {
    "padded_tokens": 0,
    "token_padding": 0,
    "block_padding": 0,
    "strided_inputs": False,
    "query_scale": 1.0,
    "softmax_scale": None,
    "rope": None,
    "table_width": 3,
    "cache_blocks": 0,
    "packed_padding": 0,
    "spare": 1,
    "num_heads": 1,
    "block_size": 64,
}


def shrunk(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest failing case that is found in at most ``MOST_TRIES`` tries.

    Parameters
    ----------
    case : Case
        A failing case.
    fails : callable
        Takes a case and returns whether it fails.
    """
    tries, again = 0, True
    while again:
        again = False
        for smaller in _smaller(case):
            tries += 1
            if tries > MOST_TRIES:
                return case
            if fails(smaller):
                case, again = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are smaller than `case`; those that reduce it most come first."""
    steps = case.steps
    for number in range(len(steps) if len(steps) > 1 else 0):
        yield _of(case, steps[:number] + steps[number + 1 :])
    for number, rows in enumerate(steps):
        for fewer in _fewer(rows):
            yield _of(case, (*steps[:number], fewer, *steps[number + 1 :]))
    for name, plain in _PLAIN.items():
        if getattr(case, name) != plain:
            yield replace(case, **{name: plain})  # type: ignore[arg-type]  # each of its own type
    for number, rows in enumerate(steps):
        for index, row in enumerate(rows):
            for shorter in _shorter(row):
                changed = (*rows[:index], shorter, *rows[index + 1 :])
                yield _of(case, (*steps[:number], changed, *steps[number + 1 :]))


def _fewer(rows: tuple[Row, ...]) -> Iterator[tuple[Row, ...]]:
    half = len(rows) // 2
    if half:
        yield rows[:half]
        yield rows[half:]
    if 2 < len(rows) <= 8:
        yield from (rows[:i] + rows[i + 1 :] for i in range(len(rows)))


def _shorter(row: Row) -> Iterator[Row]:
    if row.seq_len > 2 * row.query_len:
        yield Row(max(row.seq_len // 2, row.query_len), row.query_len)
    if row.query_len > 1:
        fewer = row.query_len // 2
        yield Row(max(row.seq_len - row.query_len + fewer, 0), fewer)


def _of(case: Case, steps: tuple[tuple[Row, ...], ...]) -> Case:
    return replace(case, rows=steps[0], then=steps[1:])
