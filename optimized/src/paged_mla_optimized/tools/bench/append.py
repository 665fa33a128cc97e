"""Time the append of 8192 tokens in every format, compared with a copy of as many bytes.

``python -m paged_mla_optimized.tools.bench.append [--only REGEX] [--out STEM]`` needs a GPU. The
bytes are the latents, keys and queries that are read, and the cached tokens, scales and queries
that are written. Calls and copies cycle through tensors that together are larger than the device's
L2 cache, as in a model, where each layer has its own tensors.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.operations.gather.launch import Gather, Spans
from paged_mla_optimized.tensors.latent_cache import empty_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.cases import P, R
from paged_mla_optimized.tools.bench.problem import SCALE, off_by
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import Launch, alone
from paged_mla_shared.formats import FORMATS
from paged_mla_shared.problem import Rope, RopePairing

TOKENS, HEADS, BLOCK_SIZE = 8192, 16, 64
_ROUND = 256 << 20  # bytes through which the calls cycle; an H200 has 50 MiB of L2
_ERROR = 0.04  # largest relative error of latents in e4m3; that of a number is up to 1 / 16


@dataclass(frozen=True)
class Step:
    """One row of the table. The rotation of queries is a separate launch."""

    cache_format: str
    rotates: str  # "nothing", "keys" or "keys and queries"

    @property
    def name(self) -> str:
        """The first cell."""
        return f"{self.cache_format}, rotates {self.rotates}"

    @property
    def config(self) -> MlaConfig:
        """The configuration of a step with one prompt of ``TOKENS`` tokens."""
        return MlaConfig(
            num_heads=HEADS,
            softmax_scale=SCALE,
            block_size=BLOCK_SIZE,
            max_rows=1,
            max_query_tokens=TOKENS,
            max_model_len=TOKENS,
            cache_format=self.cache_format,
            rope=None if self.rotates == "nothing" else Rope(RopePairing.INTERLEAVED),
        )

    @property
    def bytes(self) -> int:
        """The bytes that are read and written, without slots and tables of angles."""
        stored = FORMATS[self.cache_format]
        blocks = TOKENS // BLOCK_SIZE * stored.block_bytes(self.config, BLOCK_SIZE)
        queries = 2 * 2 * TOKENS * HEADS * P if "queries" in self.rotates else 0
        return 2 * TOKENS * (R + P) + blocks + queries


STEPS = tuple(
    Step(name, rotates)
    for name in ("bf16", "fp8_e4m3", "fp8_ds_mla", "fp8_block_token", "fp8_block_group")
    for rotates in ("nothing", "keys", "keys and queries")
)


def measure(step: Step) -> dict[str, Any]:
    """Return the times of the append and of a copy in microseconds, and both rates in GB/s."""
    append = _append(step)
    half = step.bytes // 2
    sources = torch.empty(_round(step), half, dtype=torch.uint8, device="cuda")
    turns = cycle(zip(sources, torch.empty_like(sources), strict=True))

    def copy() -> None:
        source, target = next(turns)
        target.copy_(source)

    times = alone({"append": append, "copy": copy})
    rates = {f"{kind}_gbs": step.bytes / us / 1e3 for kind, us in times.items()}
    return {"step": step.name, "bytes": step.bytes} | times | rates


def _round(step: Step) -> int:
    """Return a number of calls whose tensors together are larger than the L2 cache."""
    return -(-_ROUND // step.bytes)


def _append(step: Step) -> Launch:
    """Return the launch, after a check of the latents that it writes."""
    core = Core(step.config, "cuda")
    torch.manual_seed(0)
    blocks = TOKENS // BLOCK_SIZE
    ends = torch.tensor([0, TOKENS], dtype=torch.int32, device="cuda")
    table = torch.randperm(blocks, device="cuda").int()[None]
    core.fill(core.plan, MlaStep(ends, ends[1:], table, num_tokens=TOKENS), max_query_len=TOKENS)
    count = _round(step)
    caches = [empty_cache(step.config, blocks, "cuda") for _ in range(count)]
    latents = torch.randn(count, TOKENS, R + P, dtype=step.config.dtype, device="cuda")
    queries = latents.new_ones(count, TOKENS if "queries" in step.rotates else 0, HEADS, P)
    turns = cycle(zip(latents[..., :R], latents[..., R:], caches, queries, strict=True))

    def launch() -> None:
        ckv, k_pe, cache, q_pe = next(turns)
        core.append(core.plan, ckv, k_pe, cache, None)
        if len(q_pe) and core.rotate is not None:
            core.rotate.launch(q_pe, core.plan.positions)

    launch()
    found = torch.empty_like(latents[0])
    spans = Spans.whole(core.plan)
    core.reader(Gather).read(spans, core.as_cache(caches[0]), ckv=found[:, :R], k_pe=found[:, R:])
    want = latents[0, :, :R].float()
    off_by(found[:, :R], want, _ERROR, f"the cache of {step.name}")
    return launch


def header() -> str:
    """Return the head of the Markdown table."""
    columns = ("append of 8192 tokens", "MB", "us", "GB/s", "copy us", "copy GB/s", "append / copy")
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    cells = [row["step"], f"{row['bytes'] / 1e6:.1f}"]
    for kind in ("append", "copy"):
        cells += [f"{row[kind]:.1f}", f"{row[f'{kind}_gbs']:.0f}"]
    return row_of([*cells, f"{row['append_gbs'] / row['copy_gbs']:.2f}"])


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.append")
    options = options_of(parser, STEPS)
    run(STEPS, measure, line, header(), options)


if __name__ == "__main__":
    main()
