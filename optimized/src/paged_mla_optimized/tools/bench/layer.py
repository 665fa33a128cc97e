"""Time a layer between its projections: absorbed and materialized attention, and their launches.

``python -m paged_mla_optimized.tools.bench.layer [--only REGEX] [--peers DIR] [--out STEM]`` needs
a GPU. A line ``h16 q64 c32k`` is a step of one row with 64 queries after 32768 cached tokens. It
has the times of absorbed and of materialized attention, and the choice of the cost model. A line
``chunk ...`` is a materialized step of this kind, with the time of each launch. Its times are
interleaved with FlashAttention 3 on concatenated keys in two forms: in one call, and as in vLLM,
where new keys and context are separate and then merged, with this project's gather and merge. No
time includes the plan, which a step needs once. Each output is first checked against float32.
"""

from __future__ import annotations

import argparse
import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.config.layer import LayerConfig
from paged_mla_optimized.operations.merge.tiles import MergeTiles
from paged_mla_optimized.planning.layer_cost import Forms, Prices
from paged_mla_optimized.tensors.head_weights import HeadWeights
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.cases import P, R
from paged_mla_optimized.tools.bench.problem import SCALE, off_by
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import Launch, in_turns

N, V = 128, 128
_LIMIT = 1e-2  # largest relative error with keys, values, weights and outputs in bfloat16


@dataclass(frozen=True)
class Step:
    """A step of one row with `query_len` queries after `context_len` cached tokens."""

    name: str
    num_heads: int
    query_len: int
    context_len: int


def _step(prefix: str, num_heads: int, queries: int, context: int) -> Step:
    length = f"{context // 1024}k" if context % 1024 == 0 else str(context)
    return Step(f"{prefix}h{num_heads} q{queries} c{length}", num_heads, queries, context)


CROSSOVER = tuple(
    _step("", heads, 1 << power, context)
    for heads, context, power in itertools.product(
        (16, 128), (0, 1024, 4096, 16384, 32768, 131072), range(12)
    )
)
CHUNKS = tuple(
    _step("chunk ", heads, queries, context)
    for heads, queries, context in (
        (16, 2048, 32768),
        (128, 2048, 32768),
        (16, 8192, 0),
        (16, 2048, 131072),
        (128, 512, 8192),
    )
)


class Problem:
    """The tensors of a step, with blocks in random order, and a layer for it."""

    def __init__(
        self, step: Step, device: str = "cuda", dtype: torch.dtype = torch.bfloat16
    ) -> None:
        torch.manual_seed(0)
        self.step = step
        self.keys = step.context_len + step.query_len
        attention = MlaConfig(
            num_heads=step.num_heads,
            softmax_scale=SCALE,
            block_size=64,
            max_rows=1,
            max_query_tokens=step.query_len,
            max_model_len=self.keys,
            dtype=dtype,
        )
        self.config = LayerConfig(attention=attention, qk_nope_head_dim=N, v_head_dim=V)
        self.layer = MlaLayer(self.config, device)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, dtype=dtype, device=device)

        blocks = -(-self.keys // 64)
        self.table = torch.randperm(blocks).int()[None].to(device)
        self.cache = normal(blocks, 64, R + P)
        self.q = normal(step.query_len, step.num_heads, N + P)
        self.weights = HeadWeights(normal(step.num_heads, N + V, R) * R**-0.5, N)

    def plan(self, absorbed: int | None) -> None:
        """Plan the step with `absorbed` absorbed rows, 1 or 0; ``None`` uses the cost model."""
        step = self.step
        self.layer.plan(
            MlaStep(
                self.starts(step.query_len),
                self.starts(self.keys)[1:],
                self.table,
                num_tokens=step.query_len,
                query_lens=[step.query_len],
                max_seq_lens=[self.keys],
            ),
            absorbed_rows=absorbed,
        )

    def starts(self, length: int) -> torch.Tensor:
        """Return the prefix sums of one row of this length, int32 [2]."""
        return torch.tensor([0, length], dtype=torch.int32, device=self.q.device)

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the lse of the planned step."""
        return self.layer.attend(self.q[..., :N], self.q[..., N:], self.cache, self.weights)

    @property
    def chosen(self) -> str:
        """The choice of the cost model, "absorbed" or "materialized"."""
        lens = np.array([self.step.query_len]), np.array([self.keys])
        absorbed = Forms(Prices.of(self.config), *lens).absorbed_rows()
        return "absorbed" if absorbed else "materialized"

    def error(self, out: torch.Tensor) -> float:
        """Return the largest relative error of a few heads' last and first queries.

        Raises
        ------
        ArithmeticError
            The error is NaN or above the limit for bfloat16.
        """
        step, worst = self.step, 0.0
        tokens = self.cache[self.table[0].long()].flatten(0, 1)[: self.keys].float()
        for head in {0, step.num_heads // 2, step.num_heads - 1}:
            k_nope = tokens[:, :R] @ self.weights.w_uk[head].float().T
            v = tokens[:, :R] @ self.weights.w_uv[head].float().T
            keys = torch.cat([k_nope, tokens[:, R:]], dim=-1)
            for first in {0, max(step.query_len - 64, 0)}:
                query = torch.arange(first, min(first + 64, step.query_len), device=out.device)
                scores = SCALE * self.q[query, head].float() @ keys.T
                last = step.context_len + query[:, None]
                seen = torch.arange(self.keys, device=out.device) <= last
                want = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
                what = f"head {head} of {step.name}"
                worst = max(worst, off_by(out[query, head], want, _LIMIT, what))
        return worst


def times(launches: Mapping[str, Launch]) -> dict[str, float]:
    """Return the time of one call of each launch in microseconds, from few rounds."""
    return in_turns(launches, rounds=5, graph_ms=2.0)


def measure(step: Step, fa3: peers.Prefill | None) -> dict[str, Any]:
    """Return the errors and the times in microseconds of a step."""
    problem = Problem(step)
    if step in CHUNKS:
        return _measure_chunk(problem, fa3)
    row: dict[str, Any] = {"step": step.name, "chosen": problem.chosen, "errors": {}, "us": {}}
    for form, absorbed in (("absorbed", 1), ("materialized", 0)):
        problem.plan(absorbed)
        row["errors"][form] = problem.error(problem.attend()[0])
        row["us"] |= times({form: problem.attend})
    return row


def _measure_chunk(problem: Problem, fa3: peers.Prefill | None) -> dict[str, Any]:
    """Return the times of a materialized step, of its launches, and of FlashAttention 3."""
    problem.plan(0)
    launches: dict[str, Launch] = {"ours": problem.attend}
    if fa3 is not None:
        launches |= {"fa3": _in_one_piece(problem, fa3), "vllm": _as_vllm(problem, fa3)}
    errors = {name: problem.error(launch()[0]) for name, launch in launches.items()}
    us = times(launches)
    return {
        "step": problem.step.name,
        "chosen": problem.chosen,
        "errors": errors,
        "us": us | _shares(problem),
    }


def _shares(problem: Problem) -> dict[str, float]:
    """Return the time of each kind of launch of a materialized step, summed over its parts."""
    rows, plan = problem.layer.materialized, problem.layer.planned.materialized
    assert plan is not None
    queries = Queries(problem.q[..., :N], problem.q[..., N:])
    out = problem.q.new_zeros((*problem.q.shape[:2], V))
    answer = Answer(out, out.new_zeros(out.shape[:2], dtype=torch.float32))
    rest, shares = torch.zeros_like(out), Counter[str]()
    for part in range(rows.parts(plan)):
        launches: dict[str, Launch] = {
            "gather": partial(rows.gather, plan, part, problem.cache),
            "projection": partial(rows.project, plan, part, problem.weights),
            "attention": partial(rows.attend_chunk, plan, part, queries, answer),
        }
        if part > 0:
            rows.plan_chunk(plan, part)
            launches["plan"] = partial(rows.plan_chunk, plan, part)
            launches["merge"] = partial(rows.merge, answer, rest, answer)
        shares.update(times(launches))
    return dict(shares)


class _Concatenated:
    """Keys for FlashAttention: gathered, projected, and with a copy of k_pe for each head."""

    def __init__(self, problem: Problem) -> None:
        self.problem, step = problem, problem.step
        self.mla = PagedMla(problem.config.attention)
        lengths = problem.starts(step.query_len), problem.starts(problem.keys)[1:]
        self.mla.plan(MlaStep(*lengths, problem.table, num_tokens=step.query_len))
        self.ckv, self.k_pe = (problem.cache.new_empty(problem.keys, width) for width in (R, P))
        lines = step.num_heads * (N + V)
        self.projected = self.ckv.new_empty(problem.keys, lines)

    def heads(self, keys: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k [K, H, N + P] and v [K, H, V] of the gathered tokens in a slice."""
        heads = self.problem.step.num_heads
        self.problem.weights.materialize(self.ckv[keys], self.projected[keys])
        k_nope, v = torch.split(self.projected[keys].view(-1, heads, N + V), [N, V], dim=-1)
        k_pe = self.k_pe[keys][:, None].expand(-1, heads, -1)
        return torch.cat([k_nope, k_pe], dim=-1), v

    def gather(self) -> None:
        """Gather all keys of the row from the cache."""
        self.mla.gather_context(self.problem.cache, self.ckv, self.k_pe)


def _in_one_piece(problem: Problem, fa3: peers.Prefill) -> Launch:
    """Return a launch of FlashAttention over the context and the new keys together."""
    keys, step = _Concatenated(problem), problem.step
    starts = problem.starts(step.query_len), problem.starts(problem.keys)

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        keys.gather()
        longest = step.query_len, problem.keys
        return fa3((problem.q, *keys.heads(slice(None))), starts, longest, causal=True)

    return attend


def _as_vllm(problem: Problem, fa3: peers.Prefill) -> Launch:
    """Return a launch of FlashAttention over the new keys, over the context, and of a merge."""
    keys, step = _Concatenated(problem), problem.step
    own, context = problem.starts(step.query_len), problem.starts(step.context_len)
    chunk = Prefill(replace(problem.config.prefill, causal=False, writes_empty=False))
    chunk.plan(own, context, num_tokens=step.query_len)
    merge = MergeTiles(chunk.tiles.tile_m, chunk.config)
    rest = problem.q.new_zeros((*problem.q.shape[:2], V))

    def attend() -> tuple[torch.Tensor, torch.Tensor]:
        keys.gather()
        heads = keys.heads(slice(step.context_len, None))
        longest = step.query_len, step.query_len
        out, lse = fa3((problem.q, *heads), (own, own), longest, causal=True)
        if step.context_len == 0:
            return out, lse
        heads = keys.heads(slice(0, step.context_len))
        longest = step.query_len, step.context_len
        before, its_lse = fa3((problem.q, *heads), (own, context), longest, causal=False)
        merge.launch(chunk.tiles, (out, lse.T), rest, (before, its_lse.T.contiguous()))
        return out, lse

    return attend


def header() -> str:
    """Return the head of the Markdown table."""
    columns = ["step", "chosen", "us", "ratio", "errors"]
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    us = row["us"]
    if "ours" in us:
        ratio = ", ".join(f"{k} {us[k] / us['ours']:.2f}" for k in ("fa3", "vllm") if k in us)
    else:
        ratio = f"chosen / better {us[row['chosen']] / min(us.values()):.2f}"
    each = ", ".join(f"{name} {time:.1f}" for name, time in us.items())
    errors = ", ".join(f"{error:.1e}" for error in row["errors"].values())
    return row_of((row["step"], row["chosen"], each, ratio, errors))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.layer")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of FA3")
    options = options_of(parser, (*CHUNKS, *CROSSOVER))
    measured = partial(measure, fa3=peers.load_fa3(options.peers))
    run((*CHUNKS, *CROSSOVER), measured, line, header(), options)


if __name__ == "__main__":
    main()
