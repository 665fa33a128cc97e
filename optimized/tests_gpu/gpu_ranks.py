"""One rank of a group of GPUs, held against one GPU that has all heads and all tokens.

Each rank makes the whole by itself, from the same numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from paged_mla_optimized import (
    Bucket,
    GraphedStep,
    HeadWeights,
    LatentCache,
    LayerConfig,
    MlaConfig,
    MlaLayer,
    PagedMla,
    StepInputs,
)
from paged_mla_optimized.parallel import ContextParallelMla, heads_of_rank, local_len
from paged_mla_optimized.tensors.step import MlaStep

R, P, N, V, BLOCK = 512, 64, 128, 128, 64
LIMIT = 1e-2  # relative: partial answers are rounded to bfloat16, and so is the whole
CONTEXTS = (5000, 1, 63, 0, 700, 129)
STEPS = {  # query tokens of each row
    "decode": (1, 1, 1, 0, 1, 1),
    "chain": (4, 4, 4, 0, 4, 4),
    "chunk": (200, 9, 1, 300, 1, 64),
    "after nothing": (5, 5, 5, 5, 5, 5),
}
MOST_TOKENS = 640


class Numbers(NamedTuple):
    """Tokens of every row as keys and as queries of all heads, and the blocks of the rows."""

    keys: list[torch.Tensor]  # one [tokens, R + P] for each row
    queries: list[torch.Tensor]  # [tokens, H, R + P]
    table: torch.Tensor


class Step(NamedTuple):
    """Tensors of one step."""

    starts: torch.Tensor
    seq_lens: torch.Tensor
    queries: torch.Tensor
    keys: torch.Tensor
    seen: tuple[int, ...]  # of each row before the step


def run(rank: int, store: str, world: int) -> None:
    """Hold every format, interleave and kind of parallelism."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    for heads, cache_format, interleave in (
        (8 * world, "bf16", 1),
        (2 * world + 1, "bf16", 64),
        (16 * world, "fp8_block_token", 16),
    ):
        name = f"{heads} heads, {cache_format}, interleave {interleave}, rank {rank}"
        _named(name, _context_parallel, rank, world, heads, cache_format, interleave)
    _named(f"tensor parallel, rank {rank}", _tensor_parallel, rank, world)
    dist.barrier()
    dist.destroy_process_group()


def _named(name: str, hold: Any, *arguments: Any) -> None:
    try:
        hold(*arguments)
    except Exception as error:
        error.add_note(name)
        raise


def _config(heads: int, cache_format: str, block_size: int) -> MlaConfig:
    return MlaConfig(
        num_heads=heads,
        softmax_scale=192**-0.5,
        block_size=block_size,
        max_rows=8,
        max_query_tokens=MOST_TOKENS,
        max_model_len=8192,
        cache_format=cache_format,
    )


def _numbers(heads: int, world: int) -> Numbers:
    generator = torch.Generator().manual_seed(3)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=generator).bfloat16().cuda()

    longest = map(max, zip(*STEPS.values(), strict=True))
    lengths = [n + queries for n, queries in zip(CONTEXTS, longest, strict=True)]
    counts = [-(-n // (BLOCK * world)) for n in lengths]
    order = torch.randperm(sum(counts), generator=generator).int()
    table = torch.full((len(counts), max(counts)), 2**31 - 1, dtype=torch.int32)
    for row, count in enumerate(counts):
        table[row, :count], order = order[:count], order[count:]
    keys = [normal(n, R + P) for n in lengths]
    return Numbers(keys, [normal(n, heads, R + P) for n in lengths], table.cuda())


def _step(numbers: Numbers, query_lens: tuple[int, ...], seen: tuple[int, ...]) -> Step:
    spans = [slice(n, n + queries) for n, queries in zip(seen, query_lens, strict=True)]
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32)
    seq_lens = torch.tensor([span.stop for span in spans], dtype=torch.int32)
    return Step(
        starts.cuda(),
        seq_lens.cuda(),
        torch.cat([row[span] for row, span in zip(numbers.queries, spans, strict=True)]),
        torch.cat([row[span] for row, span in zip(numbers.keys, spans, strict=True)]),
        seen,
    )


def _cache(config: MlaConfig, blocks: int) -> LatentCache:
    """Return a cache of NaN."""
    if not config.is_fp8:
        shape = (blocks, config.block_size, R + P)
        return LatentCache("bf16", torch.full(shape, torch.nan, dtype=config.dtype, device="cuda"))
    shape = (blocks, config.block_size, config.stored.row(config)[1])
    latents = torch.full(shape, 0x7F, dtype=torch.uint8, device="cuda")
    scales = config.stored.scale_shape(blocks, config.block_size)
    return LatentCache(config.cache_format, latents, torch.full(scales, torch.nan, device="cuda"))


def _fill(mla: Any, numbers: Numbers, cache: LatentCache, contexts: tuple[int, ...]) -> None:
    """Append every row's context, in chunks."""
    done = [0] * len(contexts)
    while any(left := [n - d for n, d in zip(contexts, done, strict=True)]):
        room, taken = MOST_TOKENS, []
        for n in left:
            taken.append(min(n, room))
            room -= taken[-1]
        step = _step(numbers, tuple(taken), tuple(done))
        mla.plan(MlaStep(step.starts, step.seq_lens, numbers.table, num_tokens=len(step.keys)))
        mla.append(step.keys[:, :R], step.keys[:, R:], cache)
        done = [d + t for d, t in zip(done, taken, strict=True)]


def _context_parallel(
    rank: int, world: int, heads: int, cache_format: str, interleave: int
) -> None:
    numbers = _numbers(heads, world)
    blocks = int((numbers.table < 2**31 - 1).sum())
    whole = PagedMla(_config(heads, cache_format, BLOCK * world))
    config = _config(heads, cache_format, BLOCK)
    mla = ContextParallelMla(config, interleave=interleave)
    mine = slice(mla.heads.start, mla.heads.stop)
    inputs = StepInputs(
        config,
        "cuda",
        {
            "q": ((MOST_TOKENS, len(mla.heads), R + P), config.dtype),
            "kv": ((MOST_TOKENS, R + P), config.dtype),
        },
    )
    caches = [_cache(whole.config, blocks), _cache(config, blocks)]
    mla.warm_up(caches[1])
    outs = torch.empty(MOST_TOKENS, len(mla.heads), R, dtype=config.dtype, device="cuda")
    lses = torch.empty(MOST_TOKENS, len(mla.heads), device="cuda")

    def layer(view: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = view.bucket.tokens
        mla.plan(MlaStep(view.cu_seqlens_q, view.seq_lens, view.block_table, num_tokens=tokens))
        q, kv = view.tokens["q"], view.tokens["kv"]
        mla.append(kv[:, :R], kv[:, R:], caches[1])
        out, lse = outs[:tokens], lses[:tokens]
        return mla.attend(q[..., :R], q[..., R:], caches[1], out=out, lse=lse)

    buckets = [Bucket(8, 8), Bucket(64, 8), Bucket(MOST_TOKENS, 8)]
    graphed = GraphedStep([], layer, inputs, buckets, caches=caches[1:])
    for name, query_lens in STEPS.items():
        contexts = (0,) * len(CONTEXTS) if name == "after nothing" else CONTEXTS
        for cache, made in zip(caches, (whole, mla), strict=True):
            for tensor in filter(lambda t: t is not None, cache[1:]):
                tensor.fill_(0x7F if tensor.dtype is torch.uint8 else torch.nan)
            _fill(made, numbers, cache, contexts)
        step = _step(numbers, query_lens, contexts)
        tokens = len(step.keys)
        whole.plan(MlaStep(step.starts, step.seq_lens, numbers.table, num_tokens=tokens))
        whole.append(step.keys[:, :R], step.keys[:, R:], caches[0])
        expected = whole.attend(step.queries[..., :R], step.queries[..., R:], caches[0])

        loaded = MlaStep(step.starts, step.seq_lens, numbers.table, num_tokens=tokens)
        inputs.load(loaded, {"q": step.queries[:, mine], "kv": step.keys})
        bucket = graphed.bucket(len(query_lens), tokens)
        eager = [t[:tokens].clone() for t in _without_waiting(graphed, inputs.view(bucket))]
        replayed = graphed.replay(len(query_lens), tokens)
        for first, second in zip(eager, replayed, strict=True):
            assert torch.equal(first, second[:tokens]), f"{name}: a replay is not the eager step"
        _near(name, eager, [t[:, mine] for t in expected])
        share = [local_len(int(n), world=world, rank=rank, interleave=interleave)
                 for n in step.seq_lens]  # fmt: skip
        last = (step.starts[1:] - 1)[step.starts.diff() > 0].long()
        assert mla.local_lens[last].tolist() == [
            n for n, queries in zip(share, query_lens, strict=True) if queries
        ]
        assert torch.isneginf(replayed[1][tokens : bucket.tokens]).all()
        assert not replayed[0][tokens : bucket.tokens].any()


def _without_waiting(graphed: GraphedStep, view: Any) -> Any:
    """Run a step eagerly; synchronising is an error, and nothing is allocated."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        answer = graphed.run_eagerly(view)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated == 0, f"{allocated} allocations in a step"
    return answer


def _near(name: str, found: Any, expected: Any) -> None:
    (out, lse), (want, want_lse) = found, expected
    assert torch.isfinite(out).all(), name
    error = float((out.float() - want.float()).norm() / want.float().norm())
    assert error < LIMIT, f"{name}: out is off by {error:.1e}"
    torch.testing.assert_close(lse, want_lse, rtol=1e-3, atol=1e-3)


def _tensor_parallel(rank: int, world: int) -> None:
    """Layers over the heads of each rank, whose projections add up to those of all heads."""
    heads = 4 * world + 1
    generator = torch.Generator().manual_seed(4)

    def normal(*sizes: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(sizes, generator=generator) * scale).bfloat16().cuda()

    mine = heads_of_rank(heads, world, rank)
    weights = HeadWeights.of_kv_b_proj(normal(heads * (N + V), R, scale=R**-0.5), heads, N)
    o_proj = normal(heads, V, 256, scale=(heads * V) ** -0.5)
    query_lens, seq_lens = [1, 4, 300], [900, 33, 300]
    tokens = sum(query_lens)
    q, kv = normal(tokens, heads, N + P), normal(tokens, R + P)
    starts = torch.tensor([0, *itertools.accumulate(query_lens)], dtype=torch.int32).cuda()
    table = torch.arange(3 * 15, dtype=torch.int32).view(3, 15).cuda()
    contents = normal(3 * 15, BLOCK, R + P)
    answers = []
    for chosen in (range(heads), mine):
        part = slice(chosen.start, chosen.stop)
        attention = replace(_config(len(chosen), "bf16", BLOCK), max_model_len=15 * BLOCK)
        layer = MlaLayer(LayerConfig(attention=attention))
        layer.plan(
            MlaStep(
                starts,
                torch.tensor(seq_lens, dtype=torch.int32).cuda(),
                table,
                num_tokens=tokens,
                query_lens=query_lens,
                max_seq_lens=seq_lens,
            )
        )
        cache = contents.clone()
        layer.append(kv[:, :R], kv[:, R:], cache)
        out, lse = layer.attend(q[:, part, :N], q[:, part, N:], cache, weights.of_heads(chosen))
        answers.append((out, lse, torch.einsum("thv,hvo->to", out.float(), o_proj[part].float())))
    (out, lse, projected), (own, own_lse, share) = answers
    part = slice(mine.start, mine.stop)
    _near("heads", (own, own_lse), (out[:, part], lse[:, part]))
    dist.all_reduce(share)
    error = float((share - projected).norm() / projected.norm())
    assert error < LIMIT, f"the sum of projections is off by {error:.1e}"
