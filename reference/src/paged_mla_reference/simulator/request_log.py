"""Logs of real traffic, request by request, as a workload.

One JSON object per line; blank lines are skipped.

=================  ==========================================================================
``id``             string; default: the line's number
``arrival``        number >= 0, in the unit of the log; required
``prompt``         list of token ids, or instead of it
``prompt_len``     tokens, made up: the same for nobody else, except for
``prefix_group``   string: requests of one group begin with the same tokens,
``prefix_len``     as many of them as this says, at most ``prompt_len``; default 0
``output``         list of token ids, or instead of it
``output_len``     tokens, made up; required without ``output``
``extra_keys``     list of strings: adapter, salt
``abort``          number, when the client hung up
=================  ==========================================================================

Only lengths, times and groups are needed, so that traffic can be replayed without its words.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from paged_mla_reference.simulator.request import Request
from paged_mla_reference.simulator.workloads import Tokens, tokens
from paged_mla_shared.errors import InvalidArgument

FIELDS = frozenset(
    {
        *("id", "arrival", "prompt", "prompt_len", "prefix_group", "prefix_len"),
        *("output", "output_len", "extra_keys", "abort"),
    }
)


def load_log(path: Path, steps_per_unit: float = 1.0) -> Iterator[Request]:
    """Return the requests of a log file, in its order.

    Parameters
    ----------
    path : Path
    steps_per_unit : float
        Engine steps in one unit of ``arrival``: 50 for seconds and steps of 20 ms.

    Raises
    ------
    InvalidArgument
        A line is no object, lacks a field, or has one this format does not know.
    """
    with path.open() as lines:
        yield from read_log(lines, steps_per_unit)


def read_log(lines: Iterable[str], steps_per_unit: float = 1.0) -> Iterator[Request]:
    """Return the requests of a log's lines (:func:`load_log`)."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _request(number, json.loads(line), steps_per_unit)
            except json.JSONDecodeError as error:
                raise InvalidArgument(f"line {number}", error, "one JSON object") from error


def _request(number: int, fields: Any, steps_per_unit: float) -> Request:
    where = f"line {number}"
    if not isinstance(fields, dict):
        raise InvalidArgument(where, type(fields).__name__, "a JSON object")
    if unknown := set(fields) - FIELDS:
        raise InvalidArgument(where, sorted(unknown), f"fields {sorted(FIELDS)}")
    if not isinstance(fields.get("arrival"), int | float) or fields["arrival"] < 0:
        raise InvalidArgument(where, fields.get("arrival"), "an arrival >= 0")
    abort = fields.get("abort")
    return Request(
        id=str(fields.get("id", number)),
        prompt=_tokens(where, "prompt", fields, _prefix(where, fields)),
        output=_tokens(where, "output", fields, ()),
        arrival=int(fields["arrival"] * steps_per_unit),
        extra_keys=tuple(fields.get("extra_keys", ())),
        abort=None if abort is None else int(abort * steps_per_unit),
    )


def _prefix(where: str, fields: dict[str, Any]) -> Tokens:
    length, whole = fields.get("prefix_len", 0), fields.get("prompt_len", 0)
    if length and ("prefix_group" not in fields or length > whole):
        raise InvalidArgument(where, f"prefix_len {length}", "a prefix_group, <= prompt_len")
    return tokens(random.Random(f"group {fields.get('prefix_group')}"), length)


def _tokens(where: str, name: str, fields: dict[str, Any], prefix: Tokens) -> Tokens:
    if (name in fields) == (f"{name}_len" in fields):
        raise InvalidArgument(where, f"{name} and {name}_len", "one of the two")
    if name in fields:
        return tuple(int(token) for token in fields[name])
    made_up = tokens(random.Random(f"{where} {name}"), fields[f"{name}_len"] - len(prefix))
    return prefix + made_up
