"""Measure the times of replayed CUDA graphs, and the ceilings of the device."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from triton.testing import do_bench

_GRAPH_MS = 10.0  # of one replay; long enough to make the start of a graph negligible
_ROUNDS = 20
_ROUNDS_BEFORE = 200  # two seconds, because a cold device is faster at its limit, by up to 4 %

Launch = Callable[[], Any]
Graph = tuple[torch.cuda.CUDAGraph, int]  # a graph and its number of calls


def alone(
    launches: Mapping[str, Launch], passes: int = 2, seconds: float = 1.0
) -> dict[str, float]:
    """Return the median time of one call of each launch in microseconds, each replayed alone.

    At its power limit the device sets its clock according to the power of the running kernel, and
    lowers the clock further for a quarter of every second. It also becomes warmer over time and
    then needs more power. All launches are therefore timed in several passes, every second pass in
    reverse order.

    Parameters
    ----------
    launches : mapping
    passes : int
        Several short passes suit kernels that need the same power.
    seconds : float
        The time of each launch in all passes. One second is longer than the period in which the
        device lowers its clock.
    """
    graphs = _captured(launches, _GRAPH_MS)
    _replayed(_turns(graphs, -(-_ROUNDS_BEFORE // len(graphs))))
    replays = round(1e3 * seconds / _GRAPH_MS / passes)
    each = [item for item in graphs.items() for _ in range(replays)]
    orders = each, each[::-1]
    return _replayed(item for number in range(passes) for item in orders[number % 2])


def in_turns(
    launches: Mapping[str, Launch], rounds: int = _ROUNDS, graph_ms: float = _GRAPH_MS
) -> dict[str, float]:
    """Return the median time of one call of each launch, with interleaved replays of their graphs.

    Times are in microseconds. The order is random in each round. All launches then run at the same
    clock, whose limit depends on the power of all of them.
    """
    return _replayed(_turns(_captured(launches, graph_ms), rounds))


def _turns(graphs: Mapping[str, Graph], rounds: int) -> list[tuple[str, Graph]]:
    draw = random.Random(0)
    return [item for _ in range(rounds) for item in draw.sample(list(graphs.items()), len(graphs))]


def _replayed(replays: Iterable[tuple[str, Graph]]) -> dict[str, float]:
    """Return the median time of one call of each launch in microseconds."""
    times: dict[str, list[float]] = {}
    for name, (graph, calls) in replays:
        times.setdefault(name, []).append(milliseconds(graph.replay) / calls)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _captured(launches: Mapping[str, Launch], graph_ms: float) -> dict[str, Graph]:
    return {name: _capture(launch, graph_ms) for name, launch in launches.items()}


def _capture(launch: Launch, graph_ms: float) -> Graph:
    """Return a graph whose replay takes about `graph_ms`, and its number of calls."""
    launch()  # compiles
    torch.cuda.synchronize()
    trial = 5
    took = milliseconds(capture(launch, trial).replay)
    calls = max(1, round(graph_ms * trial / took))
    return capture(launch, calls), calls


def capture(launch: Launch, calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of `calls` calls of `launch`, after one replay."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    graph.replay()
    return graph


def milliseconds(run: Launch) -> float:
    """Return the device time of one call in milliseconds."""
    begin, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types
        for _ in range(2)
    )
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def ceilings() -> dict[str, float]:
    """Measure GB/s of a large copy, with bytes read and written, and TFLOP/s of a product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    product = do_bench(lambda: left @ right, return_mode="median")
    return {"copy_gbs": 2 * len(source) / copy / 1e6, "matmul_tflops": 2 * 8192**3 / product / 1e9}
