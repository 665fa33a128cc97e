"""Prefills to test with on a GPU, and float32 attention to hold them against."""

import itertools
from dataclasses import dataclass

import torch

from paged_mla_optimized import PrefillConfig

LIMITS = {torch.bfloat16: 5e-3, torch.float16: 1e-3}


def prefix_sums(lens):
    return torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32, device="cuda")


@dataclass
class Step:
    """Random heads of rows of (keys, queries); NaN past the last row."""

    config: PrefillConfig
    rows: list[tuple[int, int]]
    tensors: tuple[torch.Tensor, ...]

    @property
    def lens(self):
        return [prefix_sums([row[i] for row in self.rows]) for i in (1, 0)]

    def plan(self, prefill):
        prefill.plan(*self.lens, num_tokens=len(self.tensors[0]))

    def attend(self, prefill):
        shape = (*self.tensors[0].shape[:2], self.config.v_head_dim)
        out = torch.full(shape, torch.nan, dtype=self.config.dtype, device="cuda")
        lse = torch.full(shape[:2], torch.nan, device="cuda")
        return prefill.attend(*self.tensors, out=out, lse=lse)

    def expected(self):
        """Attend in float32, row by row (S-4 to S-7)."""
        q_nope, q_pe, k_nope, k_pe, v = (tensor.float() for tensor in self.tensors)
        k_pe = k_pe[:, None].expand(-1, self.config.num_heads, -1)
        q, k = torch.cat([q_nope, q_pe], -1), torch.cat([k_nope, k_pe], -1)
        out = torch.zeros(*q.shape[:2], v.shape[2], device="cuda")
        lse = torch.full(q.shape[:2], -torch.inf, device="cuda")
        token = key = 0
        for keys, queries in self.rows:
            mine, theirs = slice(token, token + queries), slice(key, key + keys)
            token, key = token + queries, key + keys
            if keys == 0 or queries == 0:
                continue
            scores = torch.einsum("thd,shd->ths", q[mine], k[theirs]) * self.config.softmax_scale
            if self.config.causal:
                last = torch.arange(queries, device="cuda") + keys - queries
                seen = torch.arange(keys, device="cuda")[None, :] <= last[:, None]
                scores = scores.masked_fill(~seen[:, None], -torch.inf)
            lse[mine] = scores.logsumexp(-1)
            weights = scores.softmax(-1).nan_to_num(0.0)  # of queries that see nothing
            out[mine] = torch.einsum("ths,shd->thd", weights, v[theirs])
        return out, lse


def build(rows, *, spare=100, halves=False, **changes):
    defaults = {"num_heads": 3, "softmax_scale": 192**-0.5, "max_rows": 8, "max_tokens": 4096}
    config = PrefillConfig(**(defaults | changes))
    generator = torch.Generator("cuda").manual_seed(1)
    nope, rope, value = config.head_dims

    def lines(alive, *sizes):
        tensor = torch.randn(alive + spare, *sizes, generator=generator, device="cuda")
        tensor[alive:] = torch.nan
        return tensor.to(config.dtype)

    keys, queries = (sum(row[i] for row in rows) for i in (0, 1))
    projected = lines(keys, config.num_heads, nope + value)
    k_nope, v = projected[..., :nope], projected[..., nope:]
    if not halves:
        k_nope, v = k_nope.contiguous(), v.contiguous()
    q_nope, q_pe = lines(queries, config.num_heads, nope), lines(queries, config.num_heads, rope)
    return Step(config, rows, (q_nope, q_pe, k_nope, lines(keys, rope), v))


def assert_close(actual, step):
    alive = sum(queries for _, queries in step.rows)
    out, lse = step.expected()
    assert actual[0].isfinite().all()
    assert not actual[0][alive:].any()
    error = (actual[0] - out)[:alive].float().norm() / out[:alive].norm()
    assert error < LIMITS[step.config.dtype]
    lse[alive:] = -torch.inf
    torch.testing.assert_close(actual[1], lse, rtol=0, atol=1e-3)
