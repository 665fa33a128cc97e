"""Seeded inputs of 8-bit queries, with uneven magnitudes and unusual values."""

from __future__ import annotations

import zlib

import numpy as np

from paged_mla_shared.cases.queries import QueryCase
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import build_steps, put_odd_values
from paged_mla_shared.problem import Batch

FURTHEST = 6  # largest power of two of a query's magnitude, so that float16 stays normal


def build_queries(case: QueryCase, dims: MlaDims, dtype: str) -> list[Batch]:
    """Return the steps of `case` at `dims` in element type `dtype`; they need no cache.

    With ``odd_values``, the first head of the first token is all zeros.
    """
    rng = np.random.default_rng(zlib.crc32(f"{case.id} queries".encode()))
    batches = [step.batch for step in build_steps(case, dims, dtype)]
    for batch in batches:
        batch.q_pe[...] *= batch.q_pe.dtype.type(case.query_key_scale)
        parts = (batch.q_nope, batch.q_pe)
        if case.uneven:
            shape = (*batch.q_nope.shape[:2], 1)
            powers = np.exp2(rng.integers(-FURTHEST, FURTHEST, shape, endpoint=True))
            for part in parts:
                part[...] *= powers.astype(part.dtype)
        if case.token_scales:
            for part in parts:
                factors = np.resize(case.token_scales, (len(part), 1, 1))
                part[...] = (part.astype(np.float32) * factors.astype(np.float32)).astype(
                    part.dtype
                )
        if case.odd_values:
            for part in parts:
                for head in range(part.shape[1]):
                    put_odd_values(part[:, head])
                part[0, 0] = 0
    return batches
