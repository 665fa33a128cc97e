"""Compute how long a GPU was busy from a trace of ``torch.profiler``."""

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
    """An operation on the GPU: start and end in microseconds, and the number of its launch."""

    start: float
    end: float
    call: int | None


def take(folder: Path) -> list[dict[str, Any]]:
    """Return the events of the one trace in a folder, and delete the trace.

    Raises
    ------
    RuntimeError
        The folder does not contain exactly one trace.
    """
    paths = sorted(folder.glob("*.json*"))
    if len(paths) != 1:
        raise RuntimeError(
            f"{folder} has {len(paths)} traces, but must contain one; delete traces of earlier runs"
        )
    [path] = paths
    data = path.read_bytes()
    path.unlink()
    # The profiler does not escape names of kernels, and a tab in a name is not strict JSON.
    found = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data, strict=False)
    events: list[dict[str, Any]] = found["traceEvents"]
    return events


def busy_ms(events: list[dict[str, Any]]) -> float:
    """Return the milliseconds in which the GPU was busy; overlapping operations count once."""
    return _busy_us(_spans(events), -math.inf, math.inf) / 1e3


def busy_ms_of_step(events: list[dict[str, Any]]) -> float:
    """Return the median busy milliseconds of steps that launch one CUDA graph each.

    A launch with several kernels is a graph. A step lasts from the start of its graph to the start
    of the next graph, so that it includes other kernels between the two.

    Raises
    ------
    RuntimeError
        The trace has fewer than two graphs.
    """
    spans = _spans(events)
    kernels = Counter(span.call for span in spans)
    begins: dict[int, float] = {}
    for span in spans:
        if span.call is not None and kernels[span.call] > 1:
            begins.setdefault(span.call, span.start)
    steps = [_busy_us(spans, start, end) for start, end in pairwise(begins.values())]
    if not steps:
        raise RuntimeError(
            f"the trace has {len(begins)} graphs in {len(spans)} kernels, but needs at least two "
            "graphs"
        )
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
