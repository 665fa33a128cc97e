"""The absorbed form against the paper's own, both against the transformers library's formula."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import DIMS, request, scene

from paged_mla_reference.rules.absorb import UpProjection
from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rope import yarn_softmax_scale
from paged_mla_reference.rules.rounding import Rounding, round_to
from paged_mla_shared.prefill import PrefillBatch

N, V = DIMS.qk_nope_head_dim, DIMS.v_head_dim


def layer(seed: int, context: int, new: int = 4):
    """Return q, k_pe and latents of one request, kv_b_proj, and its step over a paged cache."""
    rng = np.random.default_rng(seed)
    one = request(context + new, seed)
    made = scene([one], [context])
    q = rng.standard_normal((new, DIMS.num_heads, N))
    kv_b_proj = rng.standard_normal((DIMS.num_heads * (N + V), DIMS.kv_lora_rank))
    problem = replace(made.problem, softmax_scale=yarn_softmax_scale(DIMS))
    return q, one, kv_b_proj, replace(made, problem=problem)


def materialized(made, one, q, weights):
    """Return the same step as a prefill."""
    k_nope, v = weights.materialize(one.ckv, "float32", Rounding.EXACT)
    return PrefillBatch(
        cu_seqlens_q=np.array([0, len(q)], np.int32),
        cu_seqlens_k=np.array([0, len(one)], np.int32),
        q_nope=q,
        q_pe=made.batch.q_pe,
        k_nope=k_nope,
        k_pe=one.k_pe,
        v=v,
    )


def eager_attention(q, q_pe, kv_b_proj, ckv, k_pe, scaling):
    """Return what DeepseekV3Attention computes, one batch, no head in a loop.

    ``expand_kv``, ``repeat_kv`` of one group and ``eager_attention_forward`` of the transformers
    library, written from its formulas.
    """
    length, heads = len(ckv), DIMS.num_heads
    kv = (ckv @ kv_b_proj.T).reshape(length, heads, N + V).transpose(1, 0, 2)  # [H, S, N + V]
    k_pass, value_states = np.split(kv, [N], axis=-1)
    k_rot = np.broadcast_to(k_pe, (heads, *k_pe.shape))
    key_states = np.concatenate((k_pass, k_rot), axis=-1)
    query_states = np.concatenate((q, q_pe), axis=-1).transpose(1, 0, 2)  # [H, T, N + P]
    causal_mask = np.full((len(q), length), np.finfo(np.float64).min)
    causal_mask = np.triu(causal_mask, k=length - len(q) + 1)
    attn_weights = query_states @ key_states.transpose(0, 2, 1) * scaling + causal_mask
    attn_weights = np.exp(attn_weights - attn_weights.max(axis=-1, keepdims=True))
    attn_weights /= attn_weights.sum(axis=-1, keepdims=True)
    return (attn_weights @ value_states).transpose(1, 0, 2)  # [T, H, V]


def test_the_projections_by_hand():
    """S-21: one head, N = 1, V = 1, R = 2: q * w_uk, w_uv . mean, and both of each latent."""
    one = replace(DIMS, num_heads=1, qk_nope_head_dim=1, v_head_dim=1, kv_lora_rank=2)
    weights = UpProjection.of_kv_b_proj(np.array([[1.0, 2.0], [10.0, 1.0]]), one)
    assert weights.absorb(np.array([[[3.0]]]), "float32").tolist() == [[[3.0, 6.0]]]
    assert weights.project(np.array([[[4.0, 5.0]]])).tolist() == [[[45.0]]]
    k_nope, v = weights.materialize(np.array([[4.0, 5.0], [1.0, 0.0]]), "float32")
    assert k_nope.tolist() == [[[14.0]], [[1.0]]]
    assert v.tolist() == [[[45.0]], [[10.0]]]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(seed=st.integers(0, 999), context=st.integers(0, 8))
def test_both_forms_are_one_function(seed, context):
    """S-5, S-21: absorbing W_UK and projecting by W_UV is attention with heads of N + P and V."""
    q, one, kv_b_proj, made = layer(seed, context)
    weights = UpProjection.of_kv_b_proj(kv_b_proj, DIMS)
    absorbed_queries = weights.absorb(q, "float32", Rounding.EXACT)
    batch = replace(made.batch, q_nope=absorbed_queries)
    absorbed = attend(made.problem, batch, made.image, Rounding.EXACT)
    answer = prefill(made.problem, materialized(made, one, q, weights), Rounding.EXACT)
    np.testing.assert_allclose(weights.project(absorbed.out), answer.out, atol=1e-10)
    np.testing.assert_allclose(absorbed.lse, answer.lse, atol=1e-10)


@pytest.mark.parametrize("context", [0, 1, 7])
def test_the_transformers_library_computes_the_same(context):
    """S-21: its eager attention of DeepSeek-V3 is a second oracle, which shares no code."""
    q, one, kv_b_proj, made = layer(context, context)
    weights = UpProjection.of_kv_b_proj(kv_b_proj, DIMS)
    answer = prefill(made.problem, materialized(made, one, q, weights), Rounding.EXACT)
    theirs = eager_attention(
        q, made.batch.q_pe, kv_b_proj, one.ckv, one.k_pe, made.problem.softmax_scale
    )
    np.testing.assert_allclose(answer.out, theirs, atol=1e-12)


def test_keys_and_values_are_rounded_once():
    """S-21: a product of 16-bit weights and latents is summed, then rounded; nothing before."""
    weights = UpProjection(np.array([[[1.0, 2**-9]]]), np.array([[[1.0, 2**-9]]]))
    ckv = np.array([[1.0, 1.0], [1.0, 3.0]])
    k_nope, v = weights.materialize(ckv, "bfloat16")
    exact = np.array([1 + 2**-9, 1 + 3 * 2**-9])  # below, and above, the middle of two bfloat16
    assert k_nope.ravel().astype(float).tolist() == [1.0, 1 + 2**-7]
    assert (k_nope == v).all()
    assert (
        weights.materialize(ckv, "bfloat16", Rounding.EXACT)[0].ravel().tolist() == exact.tolist()
    )
    absorbed = weights.absorb(np.array([[[1 / 3]]]), "bfloat16")
    assert (absorbed == round_to(np.array([[[1 / 3, 2**-9 / 3]]]), "bfloat16")).all()


def test_the_scale_is_that_of_the_materialized_head():
    """S-5: (N + P)^-0.5 with N = 3 and P = 2, though absorbed keys are R + P = 6 wide."""
    assert yarn_softmax_scale(DIMS) == pytest.approx(5**-0.5)
