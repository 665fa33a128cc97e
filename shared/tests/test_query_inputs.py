"""Inputs of queries are seeded, and have the values that a case specifies."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_shared.cases import QUERIES, QueryCase
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Batch
from paged_mla_shared.query_inputs import build_queries


def of(name: str, dtype: str = "float32") -> Batch:
    [case] = [case for case in QUERIES if case.name == name]
    return build_queries(case, SMALL, dtype)[0]


def test_ids_are_unique():
    """An id names one situation."""
    assert len({case.id for case in QUERIES}) == len(QUERIES)


@pytest.mark.parametrize("case", QUERIES, ids=lambda case: case.id)
def test_a_case_builds_the_same_bits_twice(case: QueryCase):
    """Inputs depend only on the id."""
    first, second = (build_queries(case, SMALL, "bfloat16") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.q_nope.tobytes() == b.q_nope.tobytes()
        assert a.q_pe.tobytes() == b.q_pe.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_uneven_queries(dtype: str):
    """S-11: heads of a token differ by powers of two, and all are finite in their type."""
    batch = of("from-data", dtype)
    live = int(batch.cu_seqlens_q[-1])
    largest = np.abs(batch.q_nope[:5].astype(np.float32)).max(axis=-1)
    assert np.isfinite(largest).all()
    assert largest.max() / largest.min() > 100
    assert np.isnan(batch.q_pe[live:].astype(np.float32)).all()


def test_small_queries():
    """S-11: one query is zeros, and one has only subnormal numbers in float32."""
    batch = of("small-tokens")
    for part in (batch.q_nope, batch.q_pe):
        assert not part[0].any()
        assert ((part[5] != 0) & (np.abs(part[5]) < 2.0**-126)).mean() > 0.99
    assert np.isnan(batch.q_nope[int(batch.cu_seqlens_q[-1]) :]).all()


def test_parts_of_different_magnitude():
    """S-11: the factor applies only to the rotated part."""
    batch = of("key-parts-300")
    assert np.abs(batch.q_pe[:5]).max() > 30 * np.abs(batch.q_nope[:5]).max()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_odd_queries(dtype: str):
    """S-11: both parts of every head contain NaN and inf, and one query is zeros."""
    batch = of("odd-values-from-data", dtype)
    for part in (batch.q_nope[1:5], batch.q_pe[1:5]):
        numbers = part.astype(np.float32)
        for kind in (np.isnan, np.isposinf):
            assert kind(numbers).any(axis=-1).all()
        assert np.isfinite(numbers).any(axis=-1).all()
    assert not batch.q_nope[0, 0].any()
    assert not batch.q_pe[0, 0].any()
