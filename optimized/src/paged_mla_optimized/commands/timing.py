"""Time ``attend`` for a step of rows of one length over random contents."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.testing import do_bench

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache, empty_cache
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported

_CLEARED = 256 << 20  # bytes that Triton writes before each replay to clear the L2 cache
_REPLAY_MS = 500
_INTERPRETED_CALLS = 3
_MOST_INTERPRETED = 1 << 18  # scores that the interpreter computes in seconds


@dataclass(frozen=True)
class Step:
    """A step of rows of one length.

    Parameters
    ----------
    rows, seq_len, query_len : int
        Number of rows, tokens of each row, and query tokens of each row.

    Raises
    ------
    InvalidArgument
        A row has more query tokens than tokens.
    """

    rows: int
    seq_len: int
    query_len: int

    def __post_init__(self) -> None:
        if self.query_len > self.seq_len:
            allowed = f"at most --seq-len, {self.seq_len}"
            raise InvalidArgument("--query-len", self.query_len, allowed)

    @property
    def num_tokens(self) -> int:
        """Query tokens of all rows."""
        return self.rows * self.query_len

    @property
    def seen(self) -> int:
        """Pairs of a query token and a key that it sees (S-4), over all rows."""
        hidden = self.query_len * (self.query_len - 1) // 2
        return self.rows * (self.query_len * self.seq_len - hidden)

    def num_blocks(self, block_size: int) -> int:
        """Return the number of cache blocks of all rows."""
        return self.rows * -(-self.seq_len // block_size)

    def nbytes(self, config: MlaConfig) -> int:
        """Return the size of the cache, the queries and the outputs in bytes."""
        size = config.block_size
        cache = self.num_blocks(size) * config.stored.block_bytes(config, size)
        widths = 2 * config.kv_lora_rank + config.qk_rope_head_dim
        line = widths * config.dtype.itemsize + torch.float32.itemsize
        return cache + self.num_tokens * config.num_heads * line


@dataclass(frozen=True)
class Timed:
    """The result of a measurement.

    Parameters
    ----------
    milliseconds : list of float
        Times of all calls, in ascending order.
    nbytes : int
        Size of the step's tensors, of the instance, and of the buffer that clears the L2 cache.
    """

    milliseconds: list[float]
    nbytes: int


def check_fits(step: Step, config: MlaConfig, device: torch.device) -> None:
    """Raise an error for a step that does not fit on the GPU, or is too slow in the interpreter.

    Raises
    ------
    Unsupported
        The step is too large.
    """
    if device.type == "cpu":
        pairs = step.seen * config.num_heads
        if pairs > _MOST_INTERPRETED:
            raise Unsupported(
                f"the step has {pairs:,} scores, and the interpreter computes at most "
                f"{_MOST_INTERPRETED:,}; use fewer --rows or --heads, or a shorter --seq-len"
            )
        return
    needed, (free, _) = step.nbytes(config) + _CLEARED, torch.cuda.mem_get_info(device)
    if needed > free:
        raise Unsupported(
            f"the step needs {gib(needed)}, and {gib(free)} of the GPU are free; "
            "use fewer --rows or a shorter --seq-len"
        )


def timed(step: Step, config: MlaConfig, device: torch.device) -> Timed:
    """Time ``attend`` calls: replays of a graph of one call, or calls in the interpreter."""
    mla = PagedMla(config, device)
    num_blocks, num_tokens = step.num_blocks(config.block_size), step.num_tokens
    cache = empty_cache(config, num_blocks, device)
    fill(cache)
    q_nope, q_pe = (
        torch.empty(
            num_tokens, config.num_heads, width, dtype=config.dtype, device=device
        ).normal_()
        for width in (config.kv_lora_rank, config.qk_rope_head_dim)
    )
    mla.plan(
        MlaStep(
            torch.arange(step.rows + 1, dtype=torch.int32, device=device) * step.query_len,
            torch.full((step.rows,), step.seq_len, dtype=torch.int32, device=device),
            torch.randperm(num_blocks, device=device).int().view(step.rows, -1),
            num_tokens=num_tokens,
            max_query_len=step.query_len,
        )
    )
    out, lse = mla.attend(q_nope, q_pe, cache)  # compiles the kernels

    def launch() -> None:
        mla.attend(q_nope, q_pe, cache, out=out, lse=lse)

    nbytes = step.nbytes(config) + sum(buffer.nbytes for buffer in mla.memory())
    if device.type == "cpu":
        times = [_milliseconds(launch) for _ in range(_INTERPRETED_CALLS)]
        return Timed(sorted(times), nbytes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    times = do_bench(graph.replay, rep=_REPLAY_MS, return_mode="all")
    return Timed(sorted(times), nbytes + _CLEARED)


def fill(cache: LatentCache) -> None:
    """Fill the cache with finite random contents in place, without memory for a second cache."""
    latents = cache.latents
    if latents.dtype in {torch.bfloat16, torch.float16, torch.float32}:
        latents.normal_()
        return
    # Without its second highest bit, an e4m3, bfloat16 or float32 number is between -2 and 2.
    latents.view(torch.uint8).random_(0, 256).bitwise_and_(0xBF)
    if cache.scales is not None:
        cache.scales.fill_(1)


def gib(nbytes: int) -> str:
    """Return a size in GiB as text."""
    return f"{nbytes / 2**30:,.2f} GiB"


def _milliseconds(launch: Callable[[], None]) -> float:
    begin = time.perf_counter()
    launch()
    return 1e3 * (time.perf_counter() - begin)
