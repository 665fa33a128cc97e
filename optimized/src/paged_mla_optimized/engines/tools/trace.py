"""For how long a GPU was busy, by a trace of ``torch.profiler``."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class Span(NamedTuple):
    """What ran on the GPU, in microseconds, and the number of the call that launched it."""

    start: float
    end: float
    call: int | None


def take(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the trace in a folder, which is deleted: the next one comes alone."""
    paths = sorted(folder.glob("*.json*"))
    if len(paths) != 1:
        raise RuntimeError(f"{folder} has {len(paths)} traces: one of what was profiled last")
    [path] = paths
    data = path.read_bytes()
    path.unlink()
    # Names of kernels are written as they are: not strictly JSON, if there is a tab in one.
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, strict=False)
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def busy_ms(events: list[dict[str, Any]]) -> float:
    """Return for how many milliseconds anything ran on the GPU: what overlaps counts once."""
    return _busy_us(_spans(events), -math.inf, math.inf) / 1e3


def busy_ms_of_step(events: list[dict[str, Any]]) -> float:
    """Return the median of steps that launch a graph each.

    A graph is what one call launches many kernels with. A step lasts from its start to that of the
    next one, so that other kernels between the two are the step's as well.
    """
    spans = _spans(events)
    kernels = Counter(span.call for span in spans)
    begins: dict[int, float] = {}
    for span in spans:
        if span.call is not None and kernels[span.call] > 1:
            begins.setdefault(span.call, span.start)
    steps = [_busy_us(spans, start, end) for start, end in pairwise(begins.values())]
    if not steps:
        raise RuntimeError(f"{len(begins)} graphs in {len(spans)} kernels of a trace: two or more")
    return median(steps) / 1e3


def _spans(events: list[dict[str, Any]]) -> list[Span]:
    found = [
        Span(event["ts"], event["ts"] + event["dur"], _call(event))
        for event in events
        if event.get("cat") in _ON_DEVICE
    ]
    return sorted(found)


def _call(event: dict[str, Any]) -> int | None:
    number: int | None = event.get("args", {}).get("correlation")
    return number


def _busy_us(spans: list[Span], start: float, end: float) -> float:
    busy, until = 0.0, start
    for span in spans:
        first, last = max(span.start, until), min(span.end, end)
        if last > first:
            busy += last - first
            until = last
    return busy
