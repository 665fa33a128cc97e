"""The absorbed form against the paper's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import DIMS, request, scene

from paged_mla_reference.absorb import (
    absorb_queries,
    attend_materialised,
    materialise_keys,
    materialise_values,
    project_values,
)
from paged_mla_reference.attention import attend
from paged_mla_reference.rope import yarn_softmax_scale
from paged_mla_reference.rounding import Rounding


def test_shapes_by_hand():
    """S-5: one head, N = 1, V = 1, R = 2: q * w_uk, and w_uv . latent."""
    assert absorb_queries(np.array([[[3.0]]]), np.array([[[1.0, 2.0]]])).tolist() == [[[3.0, 6.0]]]
    assert project_values(np.array([[[4.0, 5.0]]]), np.array([[[10.0, 1.0]]])).tolist() == [
        [[45.0]]
    ]
    latents = np.array([[4.0, 5.0], [1.0, 0.0]])
    assert materialise_keys(latents, np.array([[[1.0, 2.0]]])).tolist() == [[[14.0]], [[1.0]]]
    assert materialise_values(latents, np.array([[[10.0, 1.0]]])).tolist() == [[[45.0]], [[10.0]]]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), context=st.integers(0, 8))
def test_both_forms_are_one_function(seed, context):
    """S-5: absorbing W_UK and projecting by W_UV equals attention with heads of N + P and V."""
    rng = np.random.default_rng(seed)
    heads, rank = DIMS.num_heads, DIMS.kv_lora_rank
    w_uk = rng.standard_normal((heads, DIMS.qk_nope_head_dim, rank))
    w_uv = rng.standard_normal((heads, DIMS.v_head_dim, rank))
    one = request(context + 4, seed)
    q = rng.standard_normal((4, heads, DIMS.qk_nope_head_dim))
    scale = yarn_softmax_scale(DIMS)

    made = scene([one], [context])
    problem = replace(made.problem, softmax_scale=scale)
    batch = replace(made.batch, q_nope=absorb_queries(q, w_uk))
    absorbed = attend(problem, batch, made.image, Rounding.EXACT)

    ckv = one.ckv.astype(float)
    out, lse = attend_materialised(
        q,
        one.q_pe[context:].astype(float),
        (materialise_keys(ckv, w_uk), one.k_pe.astype(float)),
        materialise_values(ckv, w_uv),
        np.tri(4, context + 4, context, dtype=bool),
        softmax_scale=scale,
    )
    np.testing.assert_allclose(project_values(absorbed.out, w_uv), out, atol=1e-10)
    np.testing.assert_allclose(absorbed.lse, lse, atol=1e-10)


def test_the_scale_is_that_of_the_materialised_head():
    """S-5: (N + P)^-0.5 with N = 3 and P = 2, though absorbed keys are R + P = 6 wide."""
    assert yarn_softmax_scale(DIMS) == pytest.approx(5**-0.5)
