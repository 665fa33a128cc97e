"""Small steps to test with, and plain float64 attention to hold them against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from paged_mla_optimized import MlaConfig, PagedMla
from paged_mla_optimized.planning.families import AttendVariant
from paged_mla_optimized.tensors.step import MlaStep

R, P = 32, 16
TILES = AttendVariant(
    tile_m=16, tile_n=16, num_warps=1, num_stages=1, programs_per_sm=1, min_units=1
)
DIMS = {"kv_lora_rank": R, "qk_rope_head_dim": P, "dtype": torch.float32, "cache_format": "fp32"}


def of_fields(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a call that takes a step as a function of the step's fields."""
    names = {field.name for field in fields(MlaStep)}

    def called(**given: Any) -> Any:
        step = MlaStep(**{name: given.pop(name) for name in names & given.keys()})
        return call(step, **given)

    return called


def config(**changes: Any) -> MlaConfig:
    """Return a small float32 config."""
    defaults = {
        "num_heads": 4,
        "softmax_scale": 0.2,
        "block_size": 16,
        "max_rows": 8,
        "max_query_tokens": 64,
        "max_model_len": 256,
    }
    return MlaConfig(**(defaults | DIMS | changes))


@dataclass
class Step:
    """A step whose cache holds every key of its rows, and NaN everywhere else."""

    config: MlaConfig
    rows: tuple[tuple[int, int], ...]  # (seq_len, query_len)
    cu_seqlens_q: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    q_nope: torch.Tensor
    q_pe: torch.Tensor
    keys: list[torch.Tensor]  # one [seq_len, R + P] for each row
    cache: torch.Tensor
    mask: torch.Tensor | None = None

    @property
    def described(self) -> MlaStep:
        """What `plan` takes."""
        lengths = (self.cu_seqlens_q, self.seq_lens, self.block_table)
        return MlaStep(*lengths, num_tokens=len(self.q_nope), mask=self.mask)

    def attend(
        self, mla: PagedMla | None = None, max_query_len: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Plan and attend on `mla`, or on a new one, over NaN; return out and lse."""
        mla = mla or PagedMla(self.config, "cpu")
        mla.plan(replace(self.described, max_query_len=max_query_len))
        out = torch.full_like(self.q_nope, torch.nan)
        lse = torch.full(out.shape[:2], torch.nan)
        return mla.attend(self.q_nope, self.q_pe, self.cache, out=out, lse=lse)


def build(
    *rows: tuple[int, int], padded_tokens: int = 0, seed: int = 0, tail: int = 2**31 - 1,
    **changes: Any,
) -> Step:  # fmt: skip
    """Build a step with random contents; padded queries are NaN, table tails hold `tail`."""
    generator = torch.Generator().manual_seed(seed)
    cfg = config(**changes)
    live = sum(query_len for _, query_len in rows)
    blocks = [-(-seq_len // cfg.block_size) for seq_len, _ in rows]
    order = torch.randperm(sum(blocks) + 2, generator=generator)
    table = torch.full((len(rows), max(blocks, default=0) + 1), tail, dtype=torch.int32)
    cache = torch.full((sum(blocks) + 2, cfg.block_size, R + P), torch.nan)
    keys: list[torch.Tensor] = []
    for row, (seq_len, _) in enumerate(rows):
        taken, order = order[: blocks[row]], order[blocks[row] :]
        table[row, : blocks[row]] = taken
        keys.append(torch.randn(seq_len, R + P, generator=generator))
        position = torch.arange(seq_len)
        cache[taken[position // cfg.block_size], position % cfg.block_size] = keys[-1]
    queries = torch.randn(live + padded_tokens, cfg.num_heads, R + P, generator=generator)
    queries[live:] = torch.nan
    lens = torch.tensor([query_len for _, query_len in rows], dtype=torch.int32)
    cu_seqlens_q = torch.zeros(len(rows) + 1, dtype=torch.int32)
    cu_seqlens_q[1:] = lens.cumsum(0)
    return Step(
        cfg,
        rows,
        cu_seqlens_q,
        torch.tensor([seq_len for seq_len, _ in rows], dtype=torch.int32),
        table,
        queries[..., :R].contiguous(),
        queries[..., R:].contiguous(),
        keys,
        cache.to(cfg.dtype),
    )


def join(first: Step, second: Step) -> Step:
    """Return one step with the rows of two."""
    width = max(first.block_table.shape[1], second.block_table.shape[1])
    moved = second.block_table + len(first.cache)
    tables = [
        torch.nn.functional.pad(table, (0, width - table.shape[1]))
        for table in (first.block_table, moved)
    ]
    return replace(
        first,
        rows=first.rows + second.rows,
        cu_seqlens_q=torch.cat(
            [first.cu_seqlens_q, second.cu_seqlens_q[1:] + first.cu_seqlens_q[-1]]
        ),
        seq_lens=torch.cat([first.seq_lens, second.seq_lens]),
        block_table=torch.cat(tables),
        q_nope=torch.cat([first.q_nope, second.q_nope]),
        q_pe=torch.cat([first.q_pe, second.q_pe]),
        keys=first.keys + second.keys,
        cache=torch.cat([first.cache, second.cache]),
    )


def causal(seq_len: int, query_len: int) -> torch.Tensor:
    """Return which keys each query sees, bottom-right aligned (S-4), bool [query_len, seq_len]."""
    context_len = seq_len - query_len
    return torch.arange(seq_len)[None, :] <= context_len + torch.arange(query_len)[:, None]


def dense(step: Step, visible: list[torch.Tensor] | None = None) -> tuple[Any, Any]:
    """Attend in float64 (S-4 to S-7); `visible` is causal unless given, one mask for each row."""
    tokens, heads = step.q_nope.shape[:2]
    out = torch.zeros(tokens, heads, R, dtype=torch.float64)
    lse = torch.full((tokens, heads), -torch.inf, dtype=torch.float64)
    queries = torch.cat([step.q_nope, step.q_pe], dim=-1).double()
    for row, (seq_len, query_len) in enumerate(step.rows):
        if seq_len == 0 or query_len == 0:
            continue
        sees = causal(seq_len, query_len) if visible is None else visible[row]
        mine = slice(int(step.cu_seqlens_q[row]), int(step.cu_seqlens_q[row + 1]))
        keys = step.keys[row].double()
        scores = step.config.softmax_scale * torch.einsum("thd,sd->ths", queries[mine], keys)
        scores = scores.masked_fill(~sees[:, None, :], -torch.inf)
        lse[mine] = scores.logsumexp(-1)
        out[mine] = scores.softmax(-1) @ keys[:, :R]
    return out, lse


def assert_close(actual: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    """Compare out and lse at float32 accuracy, infinities exactly."""
    torch.testing.assert_close(actual[0].double(), expected[0].double(), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(actual[1].double(), expected[1].double(), rtol=2e-5, atol=2e-5)
