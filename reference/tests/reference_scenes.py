"""Requests as dense arrays, their layout in a paged cache, and outputs from plain loops.

This module does not call the reference. Tests compare the reference with these outputs, or with
numbers computed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Mask, Problem

DIMS = MlaDims(num_heads=2, kv_lora_rank=4, qk_rope_head_dim=2, qk_nope_head_dim=3, v_head_dim=5)
SCALE = 0.7
GARBAGE = 2**31 - 1


@dataclass(frozen=True)
class Request:
    """Every token of a request, as query and as key."""

    q_nope: Any  # [n, H, R]
    q_pe: Any  # [n, H, P]
    ckv: Any  # [n, R]
    k_pe: Any  # [n, P]

    def __len__(self) -> int:
        return len(self.ckv)

    def cut(self, start: int, stop: int) -> Request:
        return Request(*(a[start:stop] for a in (self.q_nope, self.q_pe, self.ckv, self.k_pe)))

    def followed_by(self, other: Request) -> Request:
        parts = zip(vars(self).values(), vars(other).values(), strict=True)
        return Request(*(np.concatenate(pair) for pair in parts))


def request(length: int, seed: int, dtype: str = "float32", dims: MlaDims = DIMS) -> Request:
    rng = np.random.default_rng(seed)

    def normal(*inner: int) -> Any:
        values = rng.standard_normal((length, *inner), dtype=np.float32)
        return values.astype(numpy_dtype(dtype))

    heads, rank, rope = dims.num_heads, dims.kv_lora_rank, dims.qk_rope_head_dim
    return Request(normal(heads, rank), normal(heads, rope), normal(rank), normal(rope))


@dataclass(frozen=True)
class Scene:
    """A step, and a cache that already holds all tokens of its rows."""

    problem: Problem
    batch: Batch
    image: CacheImage


def problem_of(**changes: Any) -> Problem:
    standard = Problem(
        dims=DIMS,
        dtype="float32",
        cache_format="fp32",
        block_size=4,
        num_blocks=40,
        max_rows=8,
        max_query_tokens=64,
        max_model_len=64,
        softmax_scale=SCALE,
    )
    return replace(standard, **changes)


def scene(
    requests: Sequence[Request],
    contexts: Sequence[int],
    *,
    dtype: str = "float32",
    block_size: int = 4,
    placement: int = 0,
    mask: Mask = Mask.CAUSAL,
    tree: Any = None,
) -> Scene:
    """Return a step with one row per request; `contexts` has the context lengths."""
    problem = problem_of(
        dtype=dtype,
        cache_format=PLAIN_FORMAT_OF_DTYPE[dtype],
        block_size=block_size,
        num_blocks=2 + 2 * sum(-(-len(r) // block_size) for r in requests),
        mask=mask,
        max_draft_tokens=64 if mask is Mask.TREE else 0,
    )
    free = np.random.default_rng(placement).permutation(problem.num_blocks).tolist()
    cells = np.full((problem.num_blocks, block_size, 6), np.nan, numpy_dtype(dtype))
    table = np.full((len(requests), 70), GARBAGE, np.int32)
    for b, one in enumerate(requests):
        for t in range(len(one)):
            if t % block_size == 0:
                table[b, t // block_size] = free.pop()
            cells[table[b, t // block_size], t % block_size] = [*one.ckv[t], *one.k_pe[t]]
    new = [one.cut(c, len(one)) for one, c in zip(requests, contexts, strict=True)]
    step = request(0, 0, dtype)
    for one in new:
        step = step.followed_by(one)
    batch = Batch(
        cu_seqlens_q=np.cumsum([0, *map(len, new)]).astype(np.int32),
        seq_lens=np.array([len(one) for one in requests], np.int32),
        block_table=table,
        **vars(step),
        mask=tree,
    )
    return Scene(problem, batch, image_of(problem, cells))


def image_of(problem: Problem, cells: Any) -> CacheImage:
    """Return a cache that lists every block; `cells` is [num_blocks, block_size, R + P]."""
    raw = np.ascontiguousarray(cells).view(np.uint8).reshape(problem.num_blocks, -1)
    everything = np.arange(problem.num_blocks)
    return CacheImage(problem.layout, everything, raw, np.zeros(4, np.uint8))


def loops(
    one: Request, queries: Sequence[int], sees: Callable[[int, int], bool], scale: float = SCALE
) -> tuple[Any, Any]:
    """Return out [q, H, R] and lse [q, H] of some of a request's tokens, one number at a time."""
    heads, rank = one.q_nope.shape[1:]
    out = np.zeros((len(queries), heads, rank))
    lse = np.full((len(queries), heads), -math.inf)
    for i, query in enumerate(queries):
        for head in range(heads):
            keys = [key for key in range(len(one)) if sees(query, key)]
            scores = [scale * _score(one, query, head, key) for key in keys]
            total = sum(math.exp(score) for score in scores)
            if keys:
                lse[i, head] = math.log(total)
            for key, score in zip(keys, scores, strict=True):
                for r in range(rank):
                    out[i, head, r] += math.exp(score) / total * float(one.ckv[key, r])
    return out, lse


def _score(one: Request, query: int, head: int, key: int) -> float:
    latent = zip(one.q_nope[query, head], one.ckv[key], strict=True)
    rotated = zip(one.q_pe[query, head], one.k_pe[key], strict=True)
    return sum(float(a) * float(b) for a, b in (*latent, *rotated))


def causal(query: int, key: int) -> bool:
    return key <= query
