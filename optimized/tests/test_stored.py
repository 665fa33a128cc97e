"""The backend against the stored vectors, which separate code has computed."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_optimized.backend import create
from paged_mla_shared.stored import Vector, load_vector, vector_ids

EXACT_IN_THE_INTERPRETER = [i for i in vector_ids() if "bf16" not in i.split("-")]


@pytest.fixture(params=EXACT_IN_THE_INTERPRETER)
def vector(request: pytest.FixtureRequest) -> Vector:
    return load_vector(request.param)


def test_a_stored_step(vector: Vector):
    """S-1, S-3, S-5, S-7, S-10: metadata, cache bytes, outputs and lse of a whole step."""
    runner = create().prepare(vector.problem)
    runner.load_cache(vector.before)
    metadata = runner.plan(vector.batch)
    assert np.array_equal(metadata.positions, vector.metadata.positions)
    assert np.array_equal(metadata.slot_mapping, vector.metadata.slot_mapping)

    runner.append(vector.batch)
    if vector.problem.rope is None:  # rotated keys are computed: their bytes may differ
        blocks = runner.read_cache(vector.after.block_ids)
        assert np.array_equal(blocks, vector.after.blocks)

    answer = runner.attend(vector.batch)
    error = np.abs(answer.out.astype(np.float64) - vector.out).max(axis=(1, 2))
    assert (error <= vector.out_budget).all()
    empty = np.isneginf(vector.lse)
    assert np.array_equal(np.isneginf(answer.lse), empty)
    error = np.abs(answer.lse[~empty] - vector.lse[~empty])
    assert (error <= vector.lse_budget[~empty]).all()
