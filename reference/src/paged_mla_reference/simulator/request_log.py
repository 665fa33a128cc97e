"""Logs of real traffic as a workload.

A log has one JSON object per line, for one request. Blank lines are skipped. A null value is the
same as a missing key, except that ``prefix_len`` and ``extra_keys`` may not be null.

=================  ==========================================================================
``id``             string, distinct; the default is the line's number
``arrival``        number >= 0, the time since the start of the log, in any unit; required
``prompt``         list of token ids; either ``prompt`` or ``prompt_len`` is required
``prompt_len``     number of prompt tokens; their ids are random and differ between requests
``prefix_group``   string; with ``prompt_len``, requests of one group start with the same
                   tokens
``prefix_len``     number of these common tokens, at most ``prompt_len``; default 0
``output``         list of token ids; either ``output`` or ``output_len`` is required
``output_len``     number of output tokens; their ids are random
``extra_keys``     list of strings, such as an adapter or a salt
``abort``          number, the time when the client aborted, not before ``arrival``
=================  ==========================================================================

A log needs only lengths, times and groups, so traffic can be replayed without its text.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paged_mla_reference.simulator.request import LATEST_STEP, Request
from paged_mla_reference.simulator.workloads import tokens
from paged_mla_shared.documents import parse_object, read_text
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

MOST_REQUESTS = 1 << 14
MOST_TOKENS = 1 << 20  # of all requests together


@dataclass(frozen=True)
class _Line:
    """The values of one line; for each of prompt and output it has a list or a length."""

    arrival: float
    id: str | None = None
    prompt: tuple[int, ...] | None = None
    prompt_len: int | None = None
    prefix_group: str | None = None
    prefix_len: int = 0
    output: tuple[int, ...] | None = None
    output_len: int | None = None
    extra_keys: tuple[str, ...] = ()
    abort: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            length = getattr(self, f"{name}_len")
            if (getattr(self, name) is None) == (length is None):
                given = f"neither {name} nor" if length is None else f"both {name} and"
                raise InvalidArgument(name, f"{given} {name}_len", "exactly one of the two")
            if length is not None and not 1 <= length <= MOST_TOKENS:
                raise InvalidArgument(f"{name}_len", length, f"1 to {MOST_TOKENS} tokens")
        if not 0 <= self.prefix_len <= (self.prompt_len or 0):
            raise InvalidArgument("prefix_len", self.prefix_len, "0 to prompt_len")
        if self.prefix_len and self.prefix_group is None:
            raise InvalidArgument("prefix_len", self.prefix_len, "0 without a prefix_group")

    def name(self, number: int) -> str:
        """Return the id of the request on line `number`."""
        return str(number) if self.id is None else self.id

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and output."""
        given = len(self.prompt or ()) + len(self.output or ())
        return given + (self.prompt_len or 0) + (self.output_len or 0)


def load_log(path: Path, steps_per_unit: float = 1.0) -> tuple[Request, ...]:
    """Return the requests of a log file, in the order of its lines.

    Parameters
    ----------
    path : Path
    steps_per_unit : float
        Engine steps in one unit of ``arrival``, > 0: 50 if the unit is a second and a step takes
        20 ms.

    Raises
    ------
    InvalidArgument
        The file cannot be read, a line is not an object of this format, or the log has more than
        ``MOST_REQUESTS`` requests or ``MOST_TOKENS`` tokens.
    """
    return read_log(read_text(path).split("\n"), steps_per_unit, str(path))


def read_log(
    lines: Sequence[str], steps_per_unit: float = 1.0, where: str = "log"
) -> tuple[Request, ...]:
    """Return the requests of a log's lines (:func:`load_log`)."""
    if not (math.isfinite(steps_per_unit) and steps_per_unit > 0):
        raise InvalidArgument("steps_per_unit", steps_per_unit, "a finite number > 0")
    used = [number for number, line in enumerate(lines, start=1) if line.strip()]
    if not 1 <= len(used) <= MOST_REQUESTS:
        raise InvalidArgument(where, f"{len(used)} requests", f"1 to {MOST_REQUESTS}")
    parsed: dict[int, _Line] = {}
    total, ids = 0, set[str]()
    for number in used:
        place = f"{where}, line {number}"
        line: _Line = build(_Line, parse_object(lines[number - 1], place), place)
        total += line.num_tokens
        if total > MOST_TOKENS:
            raise InvalidArgument(
                place, f"{total} tokens up to this line", f"at most {MOST_TOKENS} tokens"
            )
        if line.name(number) in ids:
            raise InvalidArgument(
                f"{place}: id", repr(line.name(number)), "an id that no other line has"
            )
        ids.add(line.name(number))
        parsed[number] = line
    requests: list[Request] = []
    for number, line in parsed.items():
        try:
            requests.append(_request(number, line, steps_per_unit))
        except InvalidArgument as error:
            raise error.inside(f"{where}, line {number}") from None
    return tuple(requests)


def _request(number: int, line: _Line, steps_per_unit: float) -> Request:
    arrival = _step("arrival", line.arrival, steps_per_unit)
    abort = None if line.abort is None else _step("abort", line.abort, steps_per_unit)
    prompt, output = line.prompt, line.output
    if prompt is None:
        assert line.prompt_len is not None
        prefix = tokens(random.Random(f"group {line.prefix_group}"), line.prefix_len)
        own = random.Random(f"line {number} prompt")
        prompt = prefix + tokens(own, line.prompt_len - line.prefix_len)
    if output is None:
        assert line.output_len is not None
        output = tokens(random.Random(f"line {number} output"), line.output_len)
    return Request(line.name(number), prompt, output, arrival, line.extra_keys, abort)


def _step(name: str, time: float, steps_per_unit: float) -> int:
    """Return the engine step at a time of the log, rounded down."""
    steps = time * steps_per_unit
    if not 0 <= steps <= LATEST_STEP:
        latest = f"{LATEST_STEP / steps_per_unit:g}, the time of step {LATEST_STEP}"
        raise InvalidArgument(name, time, f"0 to {latest}")
    return int(steps)
