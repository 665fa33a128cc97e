"""Attention over keys and values of every head, against plain loops and by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import DIMS, SCALE, problem_of

from paged_mla_reference.backend import create
from paged_mla_reference.rules.prefill import prefill, sees
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_prefill
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.prefill import PrefillBatch

H, N, P, V = DIMS.num_heads, DIMS.qk_nope_head_dim, DIMS.qk_rope_head_dim, DIMS.v_head_dim


def rows(*lengths, causal=True, spare=2, seed=0):
    """Return rows of (keys, queries); all that no query sees is NaN."""
    rng = np.random.default_rng(seed)
    keys, queries = (np.array(counts, np.int64) for counts in zip(*lengths, strict=True))
    cu_k, cu_q = (np.append(0, np.cumsum(n)).astype(np.int32) for n in (keys, queries))

    def normal(length, *inner):
        return rng.standard_normal((length + spare, *inner), dtype=np.float32)

    q_nope, q_pe = normal(cu_q[-1], H, N), normal(cu_q[-1], H, P)
    k_nope, k_pe, v = normal(cu_k[-1], H, N), normal(cu_k[-1], P), normal(cu_k[-1], H, V)
    read = np.append(np.repeat(queries > 0, keys), np.zeros(spare, bool))
    for array in (k_nope, k_pe, v):
        array[~read] = np.nan
    for array in (q_nope, q_pe):
        array[cu_q[-1] :] = np.nan
    return PrefillBatch(
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        q_nope=q_nope,
        q_pe=q_pe,
        k_nope=k_nope,
        k_pe=k_pe,
        v=v,
        causal=causal,
    )


def test_a_key_that_a_query_does_not_see_may_be_nan():
    """S-4: a weight of 0 times NaN would be NaN; only the last query sees the last key."""
    clean = rows((9, 5), (4, 4))
    spoiled = replace(clean, k_nope=clean.k_nope.copy(), v=clean.v.copy())
    spoiled.k_nope[8], spoiled.v[8] = np.nan, np.nan
    found, right = prefill(problem_of(), spoiled), prefill(problem_of(), clean)
    assert np.isnan(found.out[4]).all()
    assert np.isnan(found.lse[4]).all()
    for actual, expected in ((found.out, right.out), (found.lse, right.lse)):
        np.testing.assert_allclose(np.delete(actual, 4, 0), np.delete(expected, 4, 0), rtol=1e-5)


def loops(batch):
    """Return out and lse, one number at a time."""
    out = np.zeros((batch.num_tokens, H, V))
    lse = np.full((batch.num_tokens, H), -math.inf)
    for row in range(batch.num_rows):
        first, last = batch.cu_seqlens_k[row : row + 2].tolist()
        start, stop = batch.cu_seqlens_q[row : row + 2].tolist()
        for token in range(start, stop):
            limit = last - (stop - 1 - token) if batch.causal else last
            for head in range(H):
                scores = {key: _score(batch, token, key, head) for key in range(first, limit)}
                total = sum(math.exp(score) for score in scores.values())
                if scores:
                    lse[token, head] = math.log(total)
                for key, score in scores.items():
                    out[token, head] += math.exp(score) / total * batch.v[key, head].astype(float)
    return out, lse


def _score(batch, token, key, head):
    nope = zip(batch.q_nope[token, head], batch.k_nope[key, head], strict=True)
    rope = zip(batch.q_pe[token, head], batch.k_pe[key], strict=True)
    return SCALE * sum(float(a) * float(b) for a, b in (*nope, *rope))


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_rows(causal):
    """S-4, S-5, S-7, S-21: contexts, more queries than keys, rows without either; all by loops."""
    batch = rows((5, 2), (3, 3), (0, 2), (4, 0), (2, 4), (0, 0), (6, 1), causal=causal)
    answer = prefill(problem_of(), batch, Rounding.EXACT)
    out, lse = loops(batch)
    np.testing.assert_allclose(answer.out, out, atol=1e-12)
    np.testing.assert_allclose(answer.lse, lse, atol=1e-12)


def test_bottom_right():
    """S-4: the last query sees the last key; the first of too many see nothing."""
    assert sees(2, 4, causal=True).tolist() == [[True, True, True, False], [True] * 4]
    assert sees(3, 1, causal=True).tolist() == [[False], [False], [True]]
    assert sees(1, 2, causal=False).tolist() == [[True, True]]


def test_what_sees_nothing():
    """S-6: rows without keys, early queries of short rows, padding: 0 and -inf."""
    batch = rows((0, 2), (1, 3), spare=2)
    answer = prefill(problem_of(), batch).output("float32")
    assert (answer.out[[0, 1, 2, 3, 5, 6]] == 0).all()
    assert np.isneginf(answer.lse[[0, 1, 2, 3, 5, 6]]).all()
    assert np.isfinite(answer.lse[4]).all()


def test_one_key_is_its_value():
    """S-5, S-7: out is v, lse the scaled score; bounds are those of score and value."""
    batch = rows((1, 1), spare=0)
    answer = prefill(problem_of(), batch, Rounding.EXACT)
    np.testing.assert_array_equal(answer.out[0], batch.v[0])
    assert answer.lse[0, 1] == pytest.approx(_score(batch, 0, 0, 1), abs=1e-12)
    q, k = (
        np.concatenate(parts).astype(float)
        for parts in ((batch.q_nope[0, 1], batch.q_pe[0, 1]), (batch.k_nope[0, 1], batch.k_pe[0]))
    )
    assert answer.score_bound[0, 1] == pytest.approx(SCALE * np.abs(q * k).sum(), rel=1e-12)
    np.testing.assert_array_equal(answer.value_bound[0], np.abs(batch.v[0]).max(axis=-1))


def test_bounds_are_of_visible_keys():
    """S-21: what a query does not see does not widen its budget."""
    batch = rows((3, 3), spare=0)
    batch.v[2], batch.k_nope[2] = 1e6, 1e6
    answer = prefill(problem_of(), batch, Rounding.EXACT)
    assert (answer.value_bound[:2] < 10).all()
    assert (answer.score_bound[:2] < 100).all()
    assert (answer.value_bound[2] == 1e6).all()


def test_halves_of_one_projection():
    """S-21: k_nope and v are taken by their strides."""
    batch = rows((7, 3), (4, 4))
    kv = np.concatenate([batch.k_nope, batch.v], axis=-1)
    halves = replace(batch, k_nope=kv[..., :N], v=kv[..., N:])
    mine, theirs = prefill(problem_of(), halves), prefill(problem_of(), batch)
    assert mine.out.tobytes() == theirs.out.tobytes()


def test_weights_are_rounded_to_the_dtype():
    """S-21: out = bf16(bf16(w) . v / sum of w), lse in float32."""
    batch = rows((4, 4))
    answer = prefill(replace(problem_of(), dtype="bfloat16"), batch, Rounding.SPEC)
    exact = prefill(problem_of(), batch, Rounding.EXACT)
    off = np.abs(answer.out[:4] - exact.out[:4])
    assert 0 < off.max() < 2**-6 * np.abs(batch.v[:4]).max()
    assert np.abs(answer.lse[:4] - exact.lse[:4]).max() < 1e-6


def test_through_the_backend():
    """S-21: a runner returns outputs in the problem's dtype, without a cache."""
    dims = replace(DIMS, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=32)
    batch = rows((5, 2), (1, 1))
    shapes = {"q_nope": (5, H, 16), "q_pe": (5, H, 8), "k_nope": (8, H, 16), "k_pe": (8, 8)}
    ones = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    batch = replace(batch, **ones, v=np.full((8, H, 32), 3, np.float32))
    answer = create().prepare(problem_of(dims=dims)).prefill(batch)
    assert (answer.out.dtype, answer.lse.dtype) == (np.float32, np.float32)
    assert (answer.out[:3] == 3).all()
    np.testing.assert_allclose(answer.lse[2], SCALE * 24, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_nope": np.zeros((5, H, N + 1), np.float32)}, "q_nope: got shape"),
        ({"q_pe": np.zeros((5, H, P), np.float16)}, "q_pe: got dtype float16"),
        ({"k_nope": np.zeros((9, H, N), np.float32)}, "k_pe: got shape"),
        ({"k_pe": np.zeros((8, H, P), np.float32)}, "k_pe: got shape"),
        ({"v": np.zeros((8, H, N), np.float32)}, "v: got shape"),
        ({"q_nope": np.float32(1)}, "q_nope: got an array without axes"),
        ({"k_nope": np.float32(1)}, "k_nope: got an array without axes"),
        ({"cu_seqlens_q": np.zeros(0, np.int32)}, "cu_seqlens_q: got no entry"),
        ({"cu_seqlens_q": np.array(0, np.int32)}, r"cu_seqlens_q: got shape \(\)"),
        ({"cu_seqlens_q": np.array([0, 2, 3], np.int64)}, "cu_seqlens_q: got dtype int64"),
        ({"cu_seqlens_q": np.array([1, 2, 3], np.int32)}, "cu_seqlens_q: got first entry 1"),
        ({"cu_seqlens_q": np.array([0, 3, 2], np.int32)}, "cu_seqlens_q: got decreasing entries"),
        ({"cu_seqlens_q": np.array([0, 2, 6], np.int32)}, "allowed: <= T = 5"),
        ({"cu_seqlens_k": np.array([0, 6], np.int32)}, "cu_seqlens_k: got shape"),
        ({"cu_seqlens_k": np.array([0, 2, 9], np.int32)}, "allowed: <= Tk = 8"),
    ],
)
def test_a_wrong_batch_is_refused(change, message):
    """S-21: the argument, what came and what is allowed."""
    good = rows((5, 2), (1, 1))
    validate_prefill(problem_of(), good)
    with pytest.raises(InvalidArgument, match=message):
        validate_prefill(problem_of(), replace(good, **change))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_rows": 1}, "max_rows"),
        ({"max_query_tokens": 4}, "max_query_tokens"),
        ({"max_model_len": 4}, "cu_seqlens_k: got a row of 5 keys"),
    ],
)
def test_capacities_hold(limit, message):
    """S-21: as for any step."""
    with pytest.raises(InvalidArgument, match=message):
        validate_prefill(problem_of(**limit), rows((5, 2), (1, 1)))
