"""Description of the wrong part of a step, in words that help to find a bug.

One wrong element shows little. A pattern such as "head 3 in each of them", "rows 256 to 299" or
"queries at more than 4096 keys" often points to the wrong line of code.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.paging import context_lens, keys_of_tokens
from paged_mla_shared.problem import Rows

_MOST_RUNS = 4  # more runs of numbers than this are not a pattern
_PERIODS = (8, 16, 32, 64, 128)


def describe(wrong: NDArray[np.bool_], batch: Rows) -> str:
    """Describe the common properties of the wrong outputs.

    Parameters
    ----------
    wrong : bool [T, H] or [T]
        At least one element is true.
    batch : Rows
        The step that was run.

    Returns
    -------
    str
        The place of the first wrong output, the wrong heads, and every property that distinguishes
        wrong query tokens from correct ones. It contains "no pattern found" if no property does.
    """
    by_token = np.asarray(wrong if wrong.ndim == 1 else wrong.any(axis=1))
    facts = _facts(batch)
    first = int(np.flatnonzero(by_token)[0])
    parts = [_place(first, facts)]
    if wrong.ndim == 2:
        parts.append(_heads(wrong[by_token]))
    live = facts["row"] >= 0
    if (by_token & ~live).any() and not (by_token & live).any():
        parts.append("only padded tokens")
    elif by_token[live].all():
        parts.append("every query")
    else:
        told = [t for name in _WORDS if (t := _tells(name, by_token[live], facts[name][live]))]
        parts.append("; ".join(told) or "no pattern found in rows, lengths or places")
    return "; ".join(part for part in parts if part)


_WORDS = {  # the text for one wrong value of each fact, and for several
    "row": ("row {}", "rows {}"),
    "rows queries": ("rows of {} query tokens", "rows of {} query tokens"),
    "index": ("query {} of its row", "queries {} of their rows"),
    "keys": ("queries at {} keys", "queries at {} keys"),
    "rows keys": ("rows of {} keys", "rows of {} keys"),
    "token": ("token {}", "tokens {}"),
}


def _facts(batch: Rows) -> dict[str, NDArray[np.int64]]:
    """Return the properties of each query token, int64 [T] each; row -1 marks padding."""
    tokens = batch.num_tokens
    live = int(batch.cu_seqlens_q[-1])
    lengths, contexts = batch.query_lens, context_lens(batch)

    def spread(per_row: NDArray[np.integer]) -> NDArray[np.int64]:
        out = np.full(tokens, -1, np.int64)
        out[:live] = np.repeat(per_row, lengths)
        return out

    row = spread(np.where(batch.seq_lens > 0, np.arange(batch.num_rows), -1))
    index = np.arange(tokens) - spread(batch.cu_seqlens_q[:-1])
    keys = keys_of_tokens(batch)
    return {
        "row": row,
        "rows queries": spread(lengths),
        "index": index,
        "keys": np.minimum(spread(contexts) + index + 1, keys),
        "rows keys": keys,
        "token": np.arange(tokens),
    }


def _place(token: int, facts: dict[str, NDArray[np.int64]]) -> str:
    if facts["row"][token] < 0:
        return f"token {token} is padding"
    return (
        f"token {token} is query {facts['index'][token]} of row {facts['row'][token]} "
        f"(seq_len {facts['rows keys'][token]}, query_len {facts['rows queries'][token]})"
    )


def _heads(wrong: NDArray[np.bool_]) -> str:
    """Describe the wrong heads of the wrong tokens, bool [n, H]; return "" if all are wrong."""
    anywhere = np.asarray(wrong.any(axis=0))
    if anywhere.all():
        return ""
    heads = np.flatnonzero(anywhere)
    if len(heads) > 1 and len(_runs(heads)) > _MOST_RUNS:
        return f"{len(heads)} of {len(anywhere)} heads"
    where = "each of them" if wrong[:, anywhere].all() else "some of them"
    return f"{_named(heads, 'head', 'heads')} in {where}"


def _tells(name: str, wrong: NDArray[np.bool_], values: NDArray[np.int64]) -> str:
    """Return how wrong tokens differ from correct ones in one fact, or "" if they do not."""
    mine, others = values[wrong], values[~wrong]
    one, many = _WORDS[name]
    if name in {"row", "token"} and mine.min() == mine.max() and mine[0] not in others:
        return one.format(mine[0])
    if mine.min() > others.max():
        more = f"more than {others.max()}" if "keys" in name else f"{mine.min()} and later"
        return many.format(more)
    if mine.max() < others.min():
        return many.format(f"up to {mine.max()}")
    if np.intersect1d(mine, others).size == 0:
        found = np.unique(mine)
        if len(_runs(found)) <= _MOST_RUNS:
            return (one if len(found) == 1 else many).format(_numbers(found))
    for period in _PERIODS:
        rest, other_rest = np.unique(mine % period), np.unique(others % period)
        few = len(rest) <= period // 2 and len(_runs(rest)) == 1
        if few and np.intersect1d(rest, other_rest).size == 0 and len(np.unique(mine)) > 1:
            return many.format(f"{_numbers(rest)} modulo {period}")
    return ""


def _runs(numbers: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Return ascending numbers as runs of consecutive numbers, each with its first and last."""
    cuts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    return [(int(numbers[a]), int(numbers[b - 1])) for a, b in pairwise(cuts)]


def _numbers(numbers: NDArray[np.int64]) -> str:
    return ", ".join(str(a) if a == b else f"{a} to {b}" for a, b in _runs(numbers))


def _named(numbers: NDArray[np.int64], one: str, many: str) -> str:
    return f"{one if len(numbers) == 1 else many} {_numbers(numbers)}"
