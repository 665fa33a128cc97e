"""Splits that one program begins and another ends, on a GPU."""

from dataclasses import replace

import pytest
import torch

from paged_mla_optimized import PagedMla
from paged_mla_optimized.planning.choice import demand_of
from paged_mla_optimized.planning.families import portable_variant, serving_variant
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.formatted import FP8_NAMES, written
from paged_mla_optimized.tools.bench.instances import Problem, Step

LENS = (2 ** (8 + 5 * torch.rand(40, generator=torch.Generator().manual_seed(1)))).int().tolist()
ROWS = {"decode": tuple((n, 1) for n in LENS), "drafts": tuple((n, 3) for n in LENS)}
CACHES = {
    "bf16": {},
    "portable": {},
    "portable-fp8_e4m3": {"cache_format": "fp8_e4m3"},
    **{
        f"{name}-{products}": {"cache_format": name, "products": products}
        for name in FP8_NAMES
        for products in ("exact", "fast")
    },
}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_heads", [16, 32, 128])
@pytest.mark.parametrize("kind", CACHES)
def test_rows_have_the_bits_that_they_have_alone(kind, num_heads, rows):
    """S-20: cuts go through splits of a batch; each launch of many gives the same bits."""
    problem = Problem(Step(rows, num_heads, ROWS[rows]))
    config, cache = replace(problem.config, batch_invariant=True, **CACHES[kind]), problem.cache
    if config.cache_format in FP8_NAMES:
        latents = cache.flatten(0, 1)
        cache = written(config, latents, torch.arange(len(latents), device="cuda"), len(cache))
    demand = demand_of(config, device_facts(torch.device("cuda", 0)).arch)
    choose = portable_variant if kind.startswith("portable") else serving_variant
    mla = PagedMla(config, variant=choose(demand, problem.longest))
    problem.plan(mla)
    mla.workspace.fill_(torch.nan)
    out, lse = (tensor.clone() for tensor in mla.attend(problem.q_nope, problem.q_pe, cache))
    attention, plan = mla._core.attention, mla._core.plan
    states = attention.partial_lse[: 2 * len(plan.shares) : 2].isfinite().any(dim=1)
    assert states.sum() > 10
    for _ in range(30):
        for mine, first in zip(
            mla.attend(problem.q_nope, problem.q_pe, cache), (out, lse), strict=True
        ):
            assert torch.equal(mine, first)
    assert not plan.shares[:, 4:].any()
    for row in range(0, len(LENS), 3):
        begin, end = problem.cu_seqlens_q[row : row + 2].tolist()
        mla.plan(
            MlaStep(
                problem.cu_seqlens_q[row : row + 2] - begin,
                problem.seq_lens[row : row + 1],
                problem.table[row : row + 1],
                num_tokens=end - begin,
                max_query_len=problem.longest,
            )
        )
        queries = problem.q_nope[begin:end], problem.q_pe[begin:end]
        for mine, together in zip(mla.attend(*queries, cache), (out, lse), strict=True):
            assert torch.equal(mine, together[begin:end])
