"""How long a GPU is busy, by traces that are made up here."""

from __future__ import annotations

import gzip
import json

import pytest

from paged_mla_optimized.engines.tools import trace


def kernel(start, length, call, cat="kernel"):
    return {"cat": cat, "ts": start, "dur": length, "args": {"correlation": call}}


def graph(start, call, *lengths):
    """Return kernels of one graph, each 10 us after the one before it begins."""
    return [kernel(start + 10 * n, length, call) for n, length in enumerate(lengths)]


def test_overlapping_operations_count_once():
    events = [
        kernel(0, 10, 1),
        kernel(5, 10, 2, "gpu_memcpy"),
        kernel(6, 2, 3),
        kernel(100, 5, 4, "gpu_memset"),
        kernel(20, 99, 5, "cpu_op"),
        {"ph": "M", "name": "process_name"},
    ]
    assert trace.busy_ms(events) == pytest.approx(0.020)


def test_a_step_is_busy_from_its_graph_to_the_next_one():
    """What was under way as the trace began does not count, nor what follows the last graph."""
    events = [
        kernel(0, 700, 1),  # of a graph of which the trace has one kernel
        *graph(1000, 2, 10, 10, 5),
        kernel(1100, 7, 3),  # samples
        *graph(2000, 4, 10, 10, 5),
        kernel(2100, 7, 5),
        *graph(3000, 6, 10, 10, 5),
        kernel(3100, 900, 7),
    ]
    assert trace.busy_ms_of_step(events) == pytest.approx(0.032)
    assert trace.busy_ms_of_step(events[::-1]) == pytest.approx(0.032)


def test_a_trace_without_graphs_is_refused():
    with pytest.raises(RuntimeError, match="has 1 graphs in 4 kernels"):
        trace.busy_ms_of_step([*graph(0, 1, 1, 1, 1), kernel(50, 1, 2)])


@pytest.mark.parametrize("name", ["one.pt.trace.json", "one.trace.json.gz"])
def test_a_trace_is_taken_once(tmp_path, name):
    one = kernel(0, 1, 1) | {"name": "a kernel"}
    data = json.dumps({"traceEvents": [one]}).replace("a kernel", "a\tkernel").encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    assert trace.take(tmp_path) == [one | {"name": "a\tkernel"}]
    with pytest.raises(RuntimeError, match="has 0 traces"):
        trace.take(tmp_path)
