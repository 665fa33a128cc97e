"""The stored vectors and their NumPy reader."""

from __future__ import annotations

import json

import numpy as np
import pytest

from paged_mla_shared.stored import FOLDER, MANIFEST, load_vector, vector_ids


@pytest.mark.parametrize("vector_id", vector_ids())
def test_a_vector_is_whole(vector_id: str):
    """Arrays have the shapes that the problem implies."""
    vector = load_vector(vector_id)
    problem, batch = vector.problem, vector.batch
    tokens, heads = batch.num_tokens, problem.dims.num_heads
    assert vector.out.shape == (tokens, heads, problem.dims.kv_lora_rank)
    assert vector.lse.shape == vector.lse_budget.shape == (tokens, heads)
    assert vector.before.blocks.shape == (len(vector.before.block_ids), problem.layout.block_stride)
    assert vector.metadata.positions.shape == (tokens,)
    assert np.isfinite(vector.out).all()


def test_every_file_is_listed():
    """Nothing in the folder is outside the manifest."""
    listed = {entry["file"] for entry in json.loads(MANIFEST.read_text())["vectors"]}
    assert {path.name for path in FOLDER.glob("*.bin")} == listed
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2**20
