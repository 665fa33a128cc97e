"""Time prefill over materialized keys and values, compared with FlashAttention 3 and cuDNN.

``python -m paged_mla_optimized.tools.bench.prefill [--only REGEX] [--peers DIR] [--out STEM]``
needs a GPU. The cases have DeepSeek-V3's heads in bfloat16 and are causal. Keys and values are
parts of one projection, as in an engine. The other kernels take queries and keys of width 192,
which are concatenated before the timing. cuDNN runs through torch, for cases whose rows are prompts
of one length. The first output of each kernel is checked against float32. This package is timed
with and without its plan.
"""

from __future__ import annotations

import argparse
import math
import random
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.operations.prefill.portable import Heads
from paged_mla_optimized.tools.bench import peers
from paged_mla_optimized.tools.bench.problem import SCALE, off_by
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import Launch, alone, in_turns

NOPE, ROPE, V = 128, 64, 128
KINDS = ("with plan", "attend", "FA3", "cuDNN")
_RIVALS = ("FA3", "cuDNN")
_LIMIT = 6e-3  # largest relative error of a head with bfloat16 operands and weights
_CHECKED = 256  # the number of checked queries at the start and at the end of a row
_MOST_LINES = 1 << 21  # keys times heads of a drawn case; 1 GB of keys and values


@dataclass(frozen=True)
class PrefillCase:
    """A case whose rows are (keys, queries); the queries are the last tokens of their row."""

    name: str
    num_heads: int
    rows: tuple[tuple[int, int], ...]

    @property
    def flops(self) -> int:
        """Twice the number of multiply-adds, without masked keys."""
        seen = sum(keys * queries - queries * (queries - 1) // 2 for keys, queries in self.rows)
        return 2 * self.num_heads * (NOPE + ROPE + V) * seen

    @property
    def is_dense(self) -> bool:
        """Whether all rows are prompts of one length."""
        return len(set(self.rows)) == 1 and self.rows[0][0] == self.rows[0][1]


def _prompts(*lengths: int) -> tuple[tuple[int, int], ...]:
    return tuple((length, length) for length in lengths)


def _ragged() -> PrefillCase:
    draw = random.Random(5)
    lengths = (draw.randint(50, 900) for _ in range(64))
    return PrefillCase("h16 64 x 50..900", 16, _prompts(*lengths))


def drawn(count: int) -> tuple[PrefillCase, ...]:
    """Return the first `count` random cases: prompts, and chunks after a context."""
    draw = random.Random(15)
    cases: list[PrefillCase] = []
    while len(cases) < count:
        heads, rows = draw.choice((16, 32, 64, 128)), draw.choice((1, 2, 4, 8, 16, 32))
        queries = int(math.exp(draw.uniform(math.log(64), math.log(8192))))
        context = draw.choice((0, int(math.exp(draw.uniform(math.log(64), math.log(32768))))))
        lens = []
        for _ in range(rows):
            mine = draw.randint(queries // 2, queries)
            lens.append((draw.randint(context // 2, context) + mine, mine))
        if heads * sum(keys for keys, _ in lens) <= _MOST_LINES:
            name = f"h{heads} {rows} x up to {queries} behind {context}"
            cases.append(PrefillCase(name, heads, tuple(lens)))
    return tuple(cases)


CASES = (
    PrefillCase("h16 1 x 8k", 16, _prompts(8192)),
    PrefillCase("h128 1 x 8k", 128, _prompts(8192)),
    PrefillCase("h16 8 x 2k", 16, _prompts(*[2048] * 8)),
    _ragged(),
    PrefillCase("h128 512 of 8.7k", 128, ((8704, 512),)),
    PrefillCase("h16 2k of 34.8k", 16, ((34816, 2048),)),
    *drawn(10),
)


@dataclass(frozen=True)
class Tensors:
    """A case on the device."""

    case: PrefillCase
    heads: Heads
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [T, H, 192], keys [K, H, 192] and values, for the other kernels."""
        q = torch.cat([self.heads.q_nope, self.heads.q_pe], -1)
        shared = self.heads.k_pe[:, None].expand(-1, self.case.num_heads, -1)
        return q, torch.cat([self.heads.k_nope, shared], -1), self.heads.v


def build(case: PrefillCase, device: str = "cuda") -> Tensors:
    """Draw the tensors of a case; they are the same in every call on one kind of device."""
    torch.manual_seed(0)
    keys, queries = (list(accumulate(lens, initial=0)) for lens in zip(*case.rows, strict=True))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    def starts(sums: list[int]) -> torch.Tensor:
        return torch.tensor(sums, dtype=torch.int32).to(device)

    both = normal(keys[-1], case.num_heads, NOPE + V)
    q_nope, q_pe = (normal(queries[-1], case.num_heads, width) for width in (NOPE, ROPE))
    heads = Heads(q_nope, q_pe, both[..., :NOPE], normal(keys[-1], ROPE), both[..., NOPE:])
    return Tensors(case, heads, starts(queries), starts(keys))


def error(tensors: Tensors, out: torch.Tensor) -> float:
    """Return the largest relative error of the first and last queries of the outer rows and heads.

    Parameters
    ----------
    tensors : Tensors
    out : [T, H, 128]

    Raises
    ------
    ArithmeticError
        The error is NaN or above the limit for bfloat16.
    """
    case, (q, k, v), worst = tensors.case, tensors.whole, 0.0
    for row in {0, len(case.rows) - 1}:
        keys, queries = case.rows[row]
        first, start = int(tensors.cu_seqlens_q[row]), int(tensors.cu_seqlens_k[row])
        for head in {0, case.num_heads - 1}:
            mine, values = (t[start : start + keys, head].float() for t in (k, v))
            for begin in {0, max(queries - _CHECKED, 0)}:
                end = min(begin + _CHECKED, queries)
                asked = slice(first + begin, first + end)
                scores = SCALE * q[asked, head].float() @ mine.T
                unseen = scores.new_ones(scores.shape).triu(keys - queries + begin + 1).bool()
                want = scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values
                what = f"row {row} of {case.name}"
                worst = max(worst, off_by(out[asked, head], want, _LIMIT, what))
    return worst


def _ours(tensors: Tensors) -> dict[str, Launch]:
    """Return this package's launches: the plan with attention, and attention alone."""
    case, tokens = tensors.case, len(tensors.heads.q_nope)
    config = PrefillConfig(
        num_heads=case.num_heads,
        softmax_scale=SCALE,
        max_rows=len(case.rows),
        max_tokens=tokens,
    )
    prefill = Prefill(config)
    out = torch.full_like(tensors.heads.q_nope, torch.nan)
    lse = out.new_empty(out.shape[:2], dtype=torch.float32)

    def attend() -> torch.Tensor:
        return prefill.attend(*tensors.heads, out=out, lse=lse)[0]

    def both() -> torch.Tensor:
        prefill.plan(tensors.cu_seqlens_q, tensors.cu_seqlens_k, num_tokens=tokens)
        return attend()

    return {"with plan": both, "attend": attend}


def _fa3(fa3: peers.Prefill, *step: Any) -> torch.Tensor:
    return fa3(*step, causal=True)[0]


def _cudnn(tensors: Tensors) -> Launch | None:
    """Return a launch of cuDNN, or ``None`` for other cases and if this torch cannot run it."""
    if not tensors.case.is_dense:
        return None
    rows, length = len(tensors.case.rows), tensors.case.rows[0][0]
    q, k, v = (t.view(rows, length, *t.shape[1:]).transpose(1, 2) for t in tensors.whole)

    def launch() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=SCALE)
        return out.transpose(1, 2).flatten(0, 1)

    try:
        launch()
    except RuntimeError:
        return None
    return launch


def measure(case: PrefillCase, fa3: peers.Prefill | None) -> dict[str, Any]:
    """Return the errors of each kind, and its times in microseconds, alone and interleaved."""
    tensors = build(case)
    launches = _ours(tensors)
    if fa3 is not None:
        starts = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        most_keys, most_queries = map(max, zip(*case.rows, strict=True))
        # The time of FA3 does not include the concatenation.
        launches["FA3"] = partial(_fa3, fa3, tensors.whole, starts, (most_queries, most_keys))
    cudnn = _cudnn(tensors)
    if cudnn is not None:
        launches["cuDNN"] = cudnn
    return {
        "case": case.name,
        "flops": case.flops,
        "errors": {kind: error(tensors, launch()) for kind, launch in launches.items()},
        "alone": alone(launches),
        "in_turns": in_turns(launches),
    }


def header() -> str:
    """Return the head of the Markdown table."""
    columns = ["case", "TFLOP/s with plan"]
    for how in ("", ", interleaved"):
        columns += [f"{kind} us{how}" for kind in KINDS]
        columns += [f"{kind} / with plan{how}" for kind in _RIVALS]
    columns += [f"error, {kind}" for kind in KINDS]
    return head_of(columns)


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    cells = [row["case"], f"{row['flops'] / row['alone']['with plan'] / 1e6:.0f}"]
    for times in (row["alone"], row["in_turns"]):
        cells += [f"{times[kind]:.1f}" if kind in times else "-" for kind in KINDS]
        ours = times["with plan"]
        cells += [f"{times[kind] / ours:.3f}" if kind in times else "-" for kind in _RIVALS]
    cells += [f"{row['errors'][kind]:.1e}" if kind in row["errors"] else "-" for kind in KINDS]
    return row_of(cells)


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.prefill")
    parser.add_argument("--peers", type=Path, metavar="DIR", help="the folder of FA3")
    options = options_of(parser, CASES)
    fa3 = peers.load_fa3(options.peers)
    run(CASES, partial(measure, fa3=fa3), line, header(), options)


if __name__ == "__main__":
    main()
