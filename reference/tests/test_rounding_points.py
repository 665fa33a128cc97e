"""The rounding points of an output: each one is computed by hand and run through the backend."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
from reference_scenes import problem_of, request, scene

from paged_mla_reference.backend import create
from paged_mla_shared.problem import Rope, RopePairing

DIMS = replace(problem_of().dims, kv_lora_rank=16, qk_rope_head_dim=8)
QUERIES = [-step / 32 for step in range(1, 100)]
bf16 = ml_dtypes.bfloat16


def _answer(q, k, position=1, rope=None):
    """Attend one query to a zero key and to `k`; both are [R + P], all heads alike."""
    problem = problem_of(
        dims=DIMS, dtype="bfloat16", cache_format="bf16", softmax_scale=1.0, rope=rope
    )
    runner = create().prepare(problem)
    made = scene([request(position + 1, 1, "bfloat16")], [position], dtype="bfloat16")
    q = np.broadcast_to(np.array(q, bf16), (1, 2, 24))
    latents = np.array([k], bf16)
    batch = replace(
        made.batch,
        q_nope=q[..., :16],
        q_pe=q[..., 16:],
        ckv=latents[:, :16],
        k_pe=latents[:, 16:],
        block_table=np.arange(16, dtype=np.int32)[None],
    )
    runner.append(replace(batch, slot_mapping=np.array([1])))
    return runner.attend(batch)


def _unit(index, size=1.0):
    vector = np.zeros(24)
    vector[index] = size
    return vector


def test_weights_are_rounded_and_their_sum_is_not():
    """S-5: out = bf16(bf16(w) * value / sum of float32 w), not any other order of rounding."""
    scores = np.array(QUERIES, bf16).astype(np.float32)
    found = [float(_answer(_unit(0, s), _unit(0)).out[0, 0, 0]) for s in QUERIES]
    weights = np.exp(scores.astype(np.float64)).astype(np.float32).astype(np.float64)
    rounded = weights.astype(bf16).astype(np.float64)
    assert found == (rounded / (1 + weights)).astype(bf16).tolist()
    assert found != (weights / (1 + weights)).astype(bf16).tolist()
    assert found != (rounded / (1 + rounded)).astype(bf16).tolist()


def test_a_rotated_query_is_rounded():
    """S-5, S-12: q_pe turns at position 1 and meets its key as a bfloat16."""
    rope = Rope(RopePairing.INTERLEAVED)
    k = np.array([*_unit(0)[:16], 8.0, *[0.0] * 7], bf16)
    turned_k = (np.array([8 * np.cos(1), 8 * np.sin(1)])).astype(bf16).astype(np.float64)
    turned_q = np.array([4 * np.cos(1), 4 * np.sin(1)]).astype(bf16).astype(np.float64)
    lse = _answer(_unit(16, 4.0), k, rope=rope).lse[0, 0]
    assert lse == np.float32(turned_q @ turned_k)


def test_scores_are_float32():
    """S-5, S-7: a score of 1 + 2^-8 is not rounded to the dtype."""
    q = _unit(0, 1.0) + _unit(1, 2**-8)
    lse = _answer(q, 16 * (_unit(0) + _unit(1))).lse[0, 0]
    score = 16 * (1 + 2**-8)
    assert lse == np.float32(score + np.log1p(np.exp(-score)))
