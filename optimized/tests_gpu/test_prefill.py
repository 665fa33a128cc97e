"""Prefill on the device: the Gluon kernel where there is one, and the portable kernel beside it."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from paged_mla_optimized import Prefill, PrefillConfig

ROWS = {
    "prompts": [(1, 1), (64, 64), (65, 65), (200, 200), (1000, 1000)],
    "tile-edges": [(127, 127), (128, 128), (129, 129), (256, 256)],
    "context": [(900, 5), (333, 128), (1900, 700), (4097, 1)],
    "empty-rows": [(0, 0), (3, 40), (0, 3), (64, 0), (140, 300), (0, 5)],
}
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "non-causal"])
@pytest.mark.parametrize("dtype", LIMITS, ids=["bf16", "fp16"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_matches_dense_attention(rows, dtype, causal):
    """S-4, S-5, S-7: at DeepSeek's head sizes, over NaN."""
    step = build(rows, dtype=dtype, causal=causal, halves=True)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


def test_other_head_sizes():
    """S-5: GLM's, on the portable kernel."""
    step = build([(300, 200), (65, 65)], qk_nope_head_dim=192, v_head_dim=256)
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


def test_lines_that_tma_cannot_address():
    """S-9: lines of no multiple of 16 bytes, in the tiles of the same plan."""
    step = build(ROWS["prompts"])
    wide = torch.full((len(step.tensors[3]), 65), torch.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, :64] = step.tensors[3]
    step.tensors = (*step.tensors[:3], wide[:, :64], step.tensors[4])
    prefill = Prefill(step.config)
    step.plan(prefill)
    assert_close(step.attend(prefill), step)


def test_bits_do_not_change():
    """S-20: whichever program takes a tile, and with other rows or none beside a row's own."""
    step = build([(700, 700), (130, 64), (64, 64), (1, 1)], spare=0, num_heads=16)
    prefill = Prefill(step.config)
    step.plan(prefill)
    out, lse = step.attend(prefill)
    for _ in range(20):
        again = step.attend(prefill)
        assert torch.equal(again[0], out)
        assert torch.equal(again[1], lse)
    alone = Step(
        step.config,
        step.rows[1:2],
        (*(t[700:764] for t in step.tensors[:2]), *(t[700:830] for t in step.tensors[2:])),
    )
    alone.plan(prefill)
    mine = alone.attend(prefill)
    assert torch.equal(mine[0], out[700:764])
    assert torch.equal(mine[1], lse[700:764])


def test_a_graph_reads_lengths_again():
    """S-17: plan and attend captured once, replayed for other rows of the same tokens."""
    step = build([(700, 500), (40, 12)])
    prefill = Prefill(step.config)
    lens = step.lens
    tokens = len(step.tensors[0])
    prefill.plan(*lens, num_tokens=tokens)
    prefill.attend(*step.tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill.plan(*lens, num_tokens=tokens)
        answer = prefill.attend(*step.tensors)
    step.rows = [(300, 12), (440, 500)]
    for mine, other in zip(lens, step.lens, strict=True):
        mine.copy_(other)
    graph.replay()
    assert_close(answer, step)
