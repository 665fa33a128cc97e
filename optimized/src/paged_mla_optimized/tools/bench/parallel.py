"""Time decode on one GPU and on all GPUs of this host, in CUDA graphs.

``python -m paged_mla_optimized.tools.bench.parallel [--only REGEX] [--out STEM]`` needs two GPUs.
The GPUs divide the heads (tensor parallel) or the cached tokens (context parallel). A time is that
of one ``attend`` on the slowest rank. It does not include the plan, which a step needs once.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.parallel import ContextParallelMla, heads_of_rank, link_bytes
from paged_mla_optimized.parallel.exchange import Exchange
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tools.bench.cases import Case
from paged_mla_optimized.tools.bench.problem import Tensors, build, off_by
from paged_mla_optimized.tools.bench.table import head_of, options_of, row_of, run
from paged_mla_optimized.tools.bench.timing import Launch, capture, milliseconds

STEPS = tuple(
    Case(f"h{heads} q1 b{rows} s{length}", heads, 1, (length,) * rows)
    for heads in (16, 128)
    for rows, length in ((64, 8192), (8, 131072))
)
KINDS = ("one GPU", "tensor parallel", "context parallel", "of it exchange")
_CALLS = 20  # the number of calls in a graph
_ROUNDS = 30
_LIMIT = 6e-3  # largest relative error; the output and each partial result are in bfloat16


def measure(case: Case) -> dict[str, Any]:
    """Return the time of each kind in microseconds, and the bytes that each rank sends.

    All ranks must call this function.
    """
    group = dist.group.WORLD
    assert group is not None
    device = torch.device("cuda", group.rank())
    tensors = build(case, str(device))
    config, tokens = tensors.config, len(case.seq_lens)
    whole = PagedMla(config, device)
    _plan(whole, tensors, tensors.block_table)
    expected, _ = whole.attend(tensors.q_nope, tensors.q_pe, tensors.cache)

    heads = heads_of_rank(case.num_heads, group.size(), group.rank())
    q_nope, q_pe = (
        q[:, heads.start : heads.stop].contiguous() for q in (tensors.q_nope, tensors.q_pe)
    )
    divided = PagedMla(replace(config, num_heads=len(heads)), device)
    _plan(divided, tensors, tensors.block_table)
    table, cache = share_of_rank(tensors, group.size(), group.rank())
    context = ContextParallelMla(config, group, device)
    _plan(context, tensors, table)
    out, lse = context.attend(q_nope, q_pe, cache)
    off_by(out, expected[:, heads.start : heads.stop].float(), _LIMIT, case.name)
    exchange = Exchange(config, group, device)

    def swap() -> None:
        exchange.gather(q_nope, q_pe)
        exchange.swap(tokens)

    out_of_all = torch.empty_like(expected)
    lse_of_all = torch.empty(expected.shape[:2], device=device)
    queries = (tensors.q_nope, tensors.q_pe)
    launches: tuple[Launch, ...] = (
        lambda: whole.attend(*queries, tensors.cache, out=out_of_all, lse=lse_of_all),
        lambda: divided.attend(q_nope, q_pe, tensors.cache, out=out, lse=lse),
        lambda: context.attend(q_nope, q_pe, cache, out=out, lse=lse),
        swap,
    )
    times = {kind: _together(launch) for kind, launch in zip(KINDS, launches, strict=True)}
    sent = link_bytes(config, group.size(), tokens)
    return {"step": case.name, "ranks": group.size(), "us": times, "bytes": sent}


def share_of_rank(tensors: Tensors, world: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the block table of the group, and the cache of a rank with every `world`-th token.

    All rows have the same length, and all blocks are full.
    """
    rows, size = len(tensors.seq_lens), tensors.case.block_size
    blocks = tensors.case.seq_lens[0] // (size * world)
    keys = tensors.cache[tensors.block_table.long()].flatten(1, 2)  # [B, S, R + P]
    cache = keys[:, rank::world].reshape(rows * blocks, size, keys.shape[2])
    table = torch.arange(rows * blocks, dtype=torch.int32, device=cache.device)
    return table.view(rows, blocks), cache


def _plan(mla: PagedMla | ContextParallelMla, tensors: Tensors, table: torch.Tensor) -> None:
    mla.plan(MlaStep(tensors.cu_seqlens_q, tensors.seq_lens, table, num_tokens=len(tensors.q_nope)))


def _together(launch: Launch) -> float:
    """Return the median time of a call on the slowest rank; all ranks start together."""
    launch()  # compiles the kernels and connects the ranks
    torch.cuda.synchronize()
    graph = capture(launch, _CALLS)
    times = []
    for _ in range(_ROUNDS):
        dist.barrier()
        times.append(milliseconds(graph.replay) / _CALLS)
    slowest = torch.tensor(1e3 * statistics.median(times), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def header() -> str:
    """Return the head of the Markdown table."""
    times = (f"{kind} us" for kind in KINDS)
    return head_of(["step", "ranks", *times, "MB sent by a rank", "GB/s of it"])


def line(row: dict[str, Any]) -> str:
    """Return one row of the Markdown table."""
    times, sent = row["us"], row["bytes"]
    cells = [row["step"], str(row["ranks"]), *(f"{times[kind]:.1f}" for kind in KINDS)]
    return row_of([*cells, f"{sent / 1e6:.2f}", f"{sent / times[KINDS[-1]] / 1e3:.0f}"])


def work(rank: int, world: int, store: str, options: argparse.Namespace) -> None:
    """Measure as one rank; rank 0 prints and writes the table."""
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{store}/store",
        rank=rank,
        world_size=world,
        device_id=torch.device("cuda", rank),
    )
    if rank == 0:
        run(STEPS, measure, line, header(), options)
    else:
        for step in STEPS:
            if re.search(options.only, step.name):
                measure(step)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(prog="paged_mla_optimized.tools.bench.parallel")
    options, world = options_of(parser, STEPS), torch.cuda.device_count()
    if world < 2:
        parser.exit(
            2, f"this command needs two GPUs, but torch finds {world}; run it on another machine\n"
        )
    with tempfile.TemporaryDirectory() as store:
        spawn(work, (world, store, options), nprocs=world)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
