"""Time an instance for any step compared with instances for one step.

``python -m paged_mla_optimized.tools.bench.instances [--only REGEX] [--seconds S] [--out STEM]``
needs a GPU. For each step it times four instances. The first has the capacities of the step. The
second has 256 rows and 1024 tokens of up to 128k keys. The third is the first with fixed splits,
whose rows must have the same bits when they are alone. The fourth is the first with a rotation of
queries. *Alone* means that the graph of each instance is replayed for a tenth of S seconds, ten
times. At the power limit one second resolves a difference of 4 %, twelve seconds resolve 0.3 %.
"""

from __future__ import annotations

import argparse
import functools
from dataclasses import dataclass, replace

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.cases import MAIN, P, R
from paged_mla_optimized.tools.bench.problem import SCALE
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import alone, in_turns
from paged_mla_shared.problem import Rope, RopePairing

KINDS = ("sized", "general", "fixed", "rope")


@dataclass(frozen=True)
class Step:
    """A step: its name, its number of heads, and its rows as (seq_len, query_len)."""

    name: str
    num_heads: int
    rows: tuple[tuple[int, int], ...]


STEPS = (
    *(Step(c.name, c.num_heads, tuple((n, c.query_len) for n in c.seq_lens)) for c in MAIN),
    Step("h16 q1 b1 s64", 16, ((64, 1),)),
    Step("h16 100 decode of 4096 with 900 of 900", 16, (*[(4096, 1)] * 100, (900, 900))),
    Step("h16 chunk of 1024 behind 16k", 16, ((17408, 1024),)),
    Step("h128 chunk of 512 behind 16k", 128, ((16896, 512),)),
)


class Problem:
    """The tensors of a step, and the instances that run it."""

    def __init__(self, step: Step) -> None:
        torch.manual_seed(0)
        self.step = step
        seq_lens = [seq_len for seq_len, _ in step.rows]
        query_lens = [query_len for _, query_len in step.rows]
        counts = [-(-length // 64) for length in seq_lens]
        order = torch.randperm(sum(counts)).int()
        table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for row, count in enumerate(counts):
            table[row, :count], order = order[:count], order[count:]
        self.table = table.cuda()
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32).cuda()
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.cu_seqlens_q = starts.int().cuda()
        self.tokens = int(starts[-1])
        self.longest = max(query_lens)
        self.cache = _random(sum(counts), 64, R + P)
        q = _random(self.tokens, step.num_heads, R + P)
        self.q_nope, self.q_pe = q[..., :R].contiguous(), q[..., R:].contiguous()
        self.config = MlaConfig(
            num_heads=step.num_heads,
            softmax_scale=SCALE,
            block_size=64,
            max_rows=len(counts),
            max_query_tokens=self.tokens,
            max_model_len=max(seq_lens),
        )

    def instances(self) -> dict[str, PagedMla]:
        """Return an instance of each kind."""
        config = self.config
        configs = (
            config,
            replace(config, max_rows=256, max_query_tokens=1024, max_model_len=131072),
            replace(config, batch_invariant=True),
            replace(config, rope=Rope(RopePairing.INTERLEAVED)),
        )
        return {kind: PagedMla(c) for kind, c in zip(KINDS, configs, strict=True)}

    def plan(self, mla: PagedMla) -> None:
        """Plan the step with an instance."""
        mla.plan(
            MlaStep(
                self.cu_seqlens_q,
                self.seq_lens,
                self.table,
                num_tokens=self.tokens,
                max_query_len=self.longest,
            )
        )

    def attend(self, mla: PagedMla) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output and the lse of all queries."""
        return mla.attend(self.q_nope, self.q_pe, self.cache)

    def bits_of_a_row_alone_differ(self, mla: PagedMla) -> int:
        """Return the number of output elements that change when a row is alone in its step.

        The method compares the first and the last row.
        """
        whole = self.attend(mla)[0].clone()
        wrong = 0
        for row in (0, len(self.step.rows) - 1):
            begin, end = self.cu_seqlens_q[row : row + 2].tolist()
            mla.plan(
                MlaStep(
                    torch.tensor([0, end - begin], dtype=torch.int32).cuda(),
                    self.seq_lens[row : row + 1],
                    self.table[row : row + 1],
                    num_tokens=end - begin,
                    max_query_len=self.longest,
                )
            )
            out, _ = mla.attend(self.q_nope[begin:end], self.q_pe[begin:end], self.cache)
            wrong += int((out != whole[begin:end]).sum())
        self.plan(mla)
        return wrong


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / 2


def measure(step: Step, seconds: float) -> dict[str, object]:
    """Return the times of each kind of instance in microseconds, alone and interleaved.

    The result also has the number of output elements that change when a row is alone.
    """
    problem = Problem(step)
    instances = problem.instances()
    for mla in instances.values():
        problem.plan(mla)
    expected = problem.attend(instances["sized"])[0].clone()
    for kind in ("general", "fixed"):
        off = (problem.attend(instances[kind])[0] - expected).float().norm()
        if not off <= 6e-3 * expected.float().norm():
            raise ArithmeticError(f"{step.name}: the output of {kind} differs too much: {off:.1e}")
    launches = {kind: lambda mla=mla: problem.attend(mla) for kind, mla in instances.items()}
    return {
        "step": step.name,
        "bits": problem.bits_of_a_row_alone_differ(instances["fixed"]),
        "alone": alone(launches, passes=10, seconds=seconds),
        "in_turns": in_turns(launches),
    }


def line(row: dict[str, object]) -> str:
    """Return a line of the table."""
    cells = [str(row["step"])]
    for times in (row["alone"], row["in_turns"]):
        assert isinstance(times, dict)
        sized = times["sized"]
        cells += [
            f"{sized:.1f}",
            f"{times['general'] / sized:.3f}",
            f"{times['fixed'] / sized:.3f}",
        ]
        cells.append(f"{times['rope'] - sized:+.1f}")
    return row_of([*cells, str(row["bits"])])


def header() -> str:
    """Return the head of the table."""
    names = ("sized us", "general / sized", "fixed / sized", "rope - sized us")
    in_turns = (f"{name}, interleaved" for name in names)
    return head_of(["step", *names, *in_turns, "elements that differ alone"])


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.instances")
    parser.add_argument(
        "--seconds",
        type=int,
        default=1,
        choices=range(1, 61),
        metavar="S",
        help="seconds for which each instance is timed alone, 1 to 60",
    )
    options = options_of(parser, STEPS)
    run(STEPS, functools.partial(measure, seconds=options.seconds), line, header(), options)


if __name__ == "__main__":
    main()
