"""Seeded inputs of a prefill; elements that must not be read are NaN or huge, alternately."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_shared.cases.prefill import PrefillCase
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.dtypes import largest_below
from paged_mla_shared.inputs import normal
from paged_mla_shared.poison import HUGE
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import cu_seqlens_of
from paged_mla_shared.strides import strided

SPARE_KEYS = 70  # after the last row: more than a tile


def build_prefills(case: PrefillCase, dims: MlaDims, dtype: str) -> list[PrefillBatch]:
    """Return the steps of `case` at `dims`, or at the case's own dims, in element type `dtype`."""
    dims = case.problem(dims, dtype).dims
    rng = np.random.default_rng(zlib.crc32(case.id.encode()))
    return [_build(case, dims, dtype, step, rng) for step in range(len(case.steps))]


def _build(
    case: PrefillCase, dims: MlaDims, dtype: str, step: int, rng: np.random.Generator
) -> PrefillBatch:
    rows = case.steps[step]
    queries = np.array([row.query_len for row in rows], np.int64)
    keys = np.array([row.seq_len for row in rows], np.int64)
    asked = np.arange(queries.sum() + case.padded_tokens) < queries.sum()  # [T]
    read = np.append(np.repeat(queries > 0, keys), np.zeros(SPARE_KEYS, bool))  # [Tk]

    def tensor(live: NDArray[np.bool_], *inner: int, scale: float = 1.0) -> NDArray[Any]:
        values = normal(rng, (len(live), *inner), dtype, scale)
        values[~live] = np.nan
        values[np.flatnonzero(~live)[1::2]] = largest_below(dtype, HUGE)
        return values

    heads, nope, rope = dims.num_heads, dims.qk_nope_head_dim, dims.qk_rope_head_dim
    q = tensor(asked, heads, nope + rope, scale=case.query_scale)
    kv = tensor(read, heads, nope + dims.v_head_dim)  # as the projection kv_b_proj returns it
    latents = tensor(read, dims.cached_dim)
    parts = {
        "q_nope": q[..., :nope],
        "q_pe": q[..., nope:],
        "k_nope": kv[..., :nope],
        "k_pe": latents[:, dims.kv_lora_rank :],
        "v": kv[..., nope:],
    }
    sums = {"cu_seqlens_q": cu_seqlens_of(queries), "cu_seqlens_k": cu_seqlens_of(keys)}
    if case.strided_inputs:
        sums = {name: strided(array) for name, array in sums.items()}
    else:
        parts = {name: np.ascontiguousarray(part) for name, part in parts.items()}
    return PrefillBatch(
        **sums,
        **parts,
        causal=case.causal,
    )
