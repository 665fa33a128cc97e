"""Times of replayed graphs, and the ceilings of the device they run on."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from triton.testing import do_bench

_GRAPH_MS = 10.0  # of one replay: long enough for its own start not to count
_ROUNDS = 20
_ROUNDS_ALONE = 100  # a second: longer than the period in which a device at its limit slows down

Launch = Callable[[], Any]


def alone(launch: Launch) -> float:
    """Return the median time of one call in microseconds, inside a graph replayed by itself.

    At its power limit the device sets the clock by the power that this kernel takes, and lowers it
    further for a quarter of every second.
    """
    return in_turns({"": launch}, _ROUNDS_ALONE)[""]


def in_turns(
    launches: Mapping[str, Launch], rounds: int = _ROUNDS, graph_ms: float = _GRAPH_MS
) -> dict[str, float]:
    """Return the median time of one call of each, inside graphs replayed in turns.

    The order is drawn anew for each round. All then run at one clock, whichever of them takes the
    power that lowers it.
    """
    graphs = {name: _capture(launch, graph_ms) for name, launch in launches.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    order, draw = list(graphs), random.Random(0)
    for _ in range(rounds):
        draw.shuffle(order)
        for name in order:
            graph, calls = graphs[name]
            times[name].append(milliseconds(graph.replay) / calls)
    return {name: 1e3 * statistics.median(found) for name, found in times.items()}


def _capture(launch: Launch, graph_ms: float) -> tuple[torch.cuda.CUDAGraph, int]:
    """Return a graph of about as many calls as fill its time, and how many they are."""
    launch()  # compiles
    torch.cuda.synchronize()
    trial = 5
    took = milliseconds(capture(launch, trial).replay)
    calls = max(1, round(graph_ms * trial / took))
    return capture(launch, calls), calls


def capture(launch: Launch, calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of so many calls, replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            launch()
    graph.replay()
    return graph


def milliseconds(run: Launch) -> float:
    """Return the device time of one call."""
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
    """Measure GB/s of a large copy, read and written bytes counted, and TFLOP/s of a product."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = do_bench(lambda: target.copy_(source), return_mode="median")
    left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    right = torch.randn_like(left)
    product = do_bench(lambda: left @ right, return_mode="median")
    return {"copy_gbs": 2 * len(source) / copy / 1e6, "matmul_tflops": 2 * 8192**3 / product / 1e9}
