"""Measure the overhead of a step: launches, host time, memory of graphs, masks of trees.

``python -m paged_mla_optimized.tools.overhead [--json PATH]`` needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.runtime.device import device_record
from paged_mla_optimized.serving.graph import GraphedStep
from paged_mla_optimized.serving.inputs import Bucket, StepInputs, StepView
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.timing import capture, milliseconds

_DECODE = MlaConfig(
    num_heads=16,
    softmax_scale=192**-0.5,
    block_size=64,
    max_rows=256,
    max_query_tokens=256,
    max_model_len=16384,
)
_LAYERS = 4


@dataclass
class _Step:
    """A step of rows with equal lengths and random contents on the device."""

    mla: PagedMla
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    ckv: torch.Tensor
    k_pe: torch.Tensor
    cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    mask: torch.Tensor | None = None

    def plan(self) -> None:
        lengths = (self.cu_seqlens_q, self.seq_lens, self.block_table)
        self.mla.plan(MlaStep(*lengths, num_tokens=len(self.q_nope), mask=self.mask))

    def append(self) -> None:
        self.mla.append(self.ckv, self.k_pe, self.cache)

    def attend(self) -> None:
        self.mla.attend(self.q_nope, self.q_pe, self.cache, out=self.out, lse=self.lse)

    def layer(self) -> None:
        self.plan()
        self.append()
        self.attend()


def _step(config: MlaConfig, rows: int, seq_len: int, query_len: int) -> _Step:
    width = -(-seq_len // config.block_size)
    dim = config.kv_lora_rank + config.qk_rope_head_dim
    tokens = rows * query_len

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda").to(config.dtype)

    mask = None
    if config.is_tree:  # the tree is a chain, so that it attends to the same keys as causal rows
        mask = torch.ones(query_len, query_len, device="cuda").tril().bool().repeat(rows, 1).ravel()
    rank = config.kv_lora_rank
    q, kv = normal(tokens, config.num_heads, dim), normal(tokens, dim)
    return _Step(
        PagedMla(config),
        (torch.arange(rows + 1, device="cuda") * query_len).int(),
        torch.full((rows,), seq_len, dtype=torch.int32, device="cuda"),
        torch.randperm(rows * width, device="cuda").int().view(rows, width),
        q[..., :rank],
        q[..., rank:],
        kv[:, :rank],
        kv[:, rank:],
        normal(rows * width, config.block_size, dim),
        normal(tokens, config.num_heads, rank),
        torch.empty(tokens, config.num_heads, device="cuda"),
        mask,
    )


def _graph_microseconds(run: Callable[[], None], inner: int = 20, repeats: int = 21) -> float:
    """Return the median device time of one call of `run` in a graph of `inner` calls."""
    run()
    torch.cuda.synchronize()
    graph = capture(run, inner)
    times = [milliseconds(graph.replay) for _ in range(repeats)]
    return 1000 * statistics.median(times) / inner


def _host_microseconds(run: Callable[[], None], inner: int = 100, repeats: int = 31) -> float:
    """Return the median host time of one call of `run`.

    The host waits for the device every `inner` calls, so that the launch queue does not fill up.
    """
    run()
    times: list[float] = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(inner):
            run()
        times.append(1e6 * (time.perf_counter() - began) / inner)
    return statistics.median(times)


def host_times() -> dict[str, float]:
    """Return the host time of each call in eager mode, in microseconds."""
    step = _step(_DECODE, rows=1, seq_len=64, query_len=1)
    step.plan()
    return {name: _host_microseconds(getattr(step, name)) for name in ("plan", "append", "attend")}


def layer_times() -> dict[str, float]:
    """Return the device time of the calls of one row inside a graph, in microseconds."""
    times: dict[str, float] = {}
    for seq_len in (64, 8192):
        step = _step(_DECODE, rows=1, seq_len=seq_len, query_len=1)
        step.plan()
        for name in ("plan", "append", "attend", "layer"):
            times[f"{name} b1 s{seq_len}"] = _graph_microseconds(getattr(step, name))
    return times


def graph_memory() -> dict[str, int]:
    """Return the device bytes of the graph of each bucket, for a step of four layers."""
    config = _DECODE
    mla = PagedMla(config)
    dim = config.kv_lora_rank + config.qk_rope_head_dim
    cache = torch.zeros(64, config.block_size, dim, dtype=config.dtype, device="cuda")
    shapes = {
        "q": ((config.max_query_tokens, config.num_heads, dim), config.dtype),
        "kv": ((config.max_query_tokens, dim), config.dtype),
    }
    inputs = StepInputs(config, "cuda", shapes)

    def model(view: StepView) -> torch.Tensor:
        rank, hidden = config.kv_lora_rank, view.tokens["q"]
        for _ in range(_LAYERS):
            kv = view.tokens["kv"]
            mla.append(kv[:, :rank], kv[:, rank:], cache)
            out, _ = mla.attend(hidden[..., :rank], hidden[..., rank:], cache)
            hidden = torch.cat([out, hidden[..., rank:]], dim=-1)  # allocates memory in each layer
        return hidden

    buckets = [Bucket(rows, rows) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    step = GraphedStep([mla], model, inputs, buckets, caches=[cache])
    return {f"{b.rows} rows": taken for b, taken in step.graph_bytes.items()}


def tree_against_chain() -> dict[str, float]:
    """Return the device time, in microseconds, of verifying 8 drafts in 32 rows of 8192 keys.

    The drafts are a chain, and the same chain as a tree.
    """
    chain = replace(_DECODE, max_rows=32)
    tree = replace(chain, mask="tree:qlen", max_draft_tokens=8)
    times: dict[str, float] = {}
    for name, config in (("chain", chain), ("tree", tree)):
        step = _step(config, rows=32, seq_len=8192, query_len=8)
        step.plan()
        times[f"{name} attend"] = _graph_microseconds(step.attend, inner=5)
        times[f"{name} layer"] = _graph_microseconds(step.layer, inner=5)
    times["attend ratio"] = times["tree attend"] / times["chain attend"]
    times["layer ratio"] = times["tree layer"] / times["chain layer"]
    return times


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and, with ``--json``, write the numbers."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.overhead", description=__doc__)
    parser.add_argument("--json", type=Path, metavar="PATH")
    options = parser.parse_args(arguments)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json: got {options.json}; allowed: a file in an existing folder")
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU; run this command on a machine with one")
    figures: dict[str, Any] = {
        **device_record(),
        "host_us": host_times(),
        "graph_us": layer_times(),
        "graph_bytes": graph_memory(),
        "verify_us": tree_against_chain(),
    }
    for group, values in figures.items():
        print(group if isinstance(values, dict) else f"{group}: {values}")
        for name, value in values.items() if isinstance(values, dict) else ():
            print(f"  {name:24} {value:,.2f}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
