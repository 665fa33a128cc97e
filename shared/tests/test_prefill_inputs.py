"""Inputs of a prefill are seeded, and poisoned in places that must not be read."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_shared.cases import PREFILLS, PrefillCase
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import INT32_MAX
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import SPARE_KEYS, build_prefills

ARRAYS = ("q_nope", "q_pe", "k_nope", "k_pe", "v")


def of(name: str, dtype: str = "float32") -> PrefillBatch:
    [case] = [case for case in PREFILLS if case.name == name]
    return build_prefills(case, SMALL, dtype)[0]


def is_poison(array: np.ndarray) -> np.ndarray:
    flat = array.astype(np.float64).reshape(len(array), -1)
    return (np.isnan(flat) | (np.abs(flat) > 1e4)).all(axis=1)


def test_ids_are_unique():
    """An id names one situation."""
    assert len({case.id for case in PREFILLS}) == len(PREFILLS)


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.id)
def test_a_case_builds_the_same_bits_twice(case: PrefillCase):
    """Inputs depend only on the id, and fit the problem's capacities."""
    first, second = (build_prefills(case, SMALL, "bfloat16") for _ in range(2))
    problem = case.problem(SMALL, "bfloat16")
    for a, b in zip(first, second, strict=True):
        assert all(getattr(a, name).tobytes() == getattr(b, name).tobytes() for name in ARRAYS)
        assert a.num_tokens <= problem.max_query_tokens
        assert a.num_rows <= problem.max_rows
        assert a.seq_lens.max(initial=0) <= problem.max_model_len


@pytest.mark.parametrize("case", PREFILLS, ids=lambda case: case.id)
def test_places_that_must_not_be_read_are_poison(case: PrefillCase):
    """S-9: keys of rows without queries, keys after the last row, and padded queries."""
    for batch in build_prefills(case, SMALL, "float32"):
        live = int(batch.cu_seqlens_k[-1])
        assert len(batch.k_pe) == live + SPARE_KEYS
        unread = np.ones(len(batch.k_pe), bool)
        unread[:live] = np.repeat(batch.query_lens == 0, batch.seq_lens)
        for name in ("k_nope", "k_pe", "v"):
            assert (is_poison(getattr(batch, name)) == unread).all()
        padding = np.arange(batch.num_tokens) >= batch.cu_seqlens_q[-1]
        for name in ("q_nope", "q_pe"):
            assert (is_poison(getattr(batch, name)) == padding).all()


def test_halves_of_a_projection():
    """S-21: a head's values follow its key, and a rotated key follows its latent."""
    batch = of("halves")
    heads, nope = batch.k_nope.shape[1:]
    width = nope + batch.v.shape[2]
    assert batch.k_nope.strides == batch.v.strides == (heads * width * 4, width * 4, 4)
    assert batch.v.__array_interface__["data"][0] - batch.k_nope.__array_interface__["data"][0] == (
        nope * 4
    )
    assert batch.k_pe.strides[0] == SMALL.cached_dim * 4
    assert of("ragged").v.flags.c_contiguous


def test_lengths_are_strided_with_the_rest():
    """S-9: prefix sums of queries and of keys."""
    batch = of("halves")
    for sums in (batch.cu_seqlens_q, batch.cu_seqlens_k):
        assert sums.base is not None
        assert sums.strides == (8,)
        assert (sums.base[1::2] == INT32_MAX).all()
    assert of("ragged").cu_seqlens_k.flags.c_contiguous


def test_dims_of_a_model():
    """S-21: a case may have dims of its own, and its head count."""
    batch = of("glm-ragged")
    assert (batch.q_nope.shape[1:], batch.q_pe.shape[2]) == ((2, 192), 64)
    assert batch.v.shape[2] == 256
    assert batch.query_width == 256
