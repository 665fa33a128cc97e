"""Closed forms, plain loops, and what must not be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import SCALE, causal, image_of, loops, request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.problem import Mask, Rope, RopePairing


def _exact(made):
    return attend(made.problem, made.batch, made.image, Rounding.EXACT)


def _with_keys(one, ckv, k_pe):
    return replace(one, ckv=ckv.astype(np.float32), k_pe=k_pe.astype(np.float32))


@pytest.mark.parametrize("length", [1, 2, 5, 9])
def test_equal_keys_give_the_mean(length):
    """S-5, S-7: orthogonal queries give equal scores 0: out is the mean, lse the log of n."""
    one = request(length, 1)
    asks_nothing = replace(one, q_nope=one.q_nope * 0, q_pe=one.q_pe * 0)
    answer = _exact(scene([asks_nothing], [length - 1]))
    np.testing.assert_allclose(answer.out[0, 0], one.ckv.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(answer.lse, np.log(length), atol=1e-15)


def test_lse_of_equal_scores():
    """S-7: n scores of s give s + ln n, natural and of the scaled score."""
    one = request(6, 1)
    same = _with_keys(one, np.ones((6, 4)), np.ones((6, 2)))
    score = SCALE * (one.q_nope[5].astype(float).sum(-1) + one.q_pe[5].astype(float).sum(-1))
    np.testing.assert_allclose(_exact(scene([same], [5])).lse[0], score + np.log(6), rtol=1e-12)


def test_a_dominant_key_is_selected():
    """S-5: a score 1000 above all others returns its latent, without overflow."""
    one = request(5, 2)
    ckv = np.zeros((5, 4))
    ckv[3] = 1e3 * one.q_nope[4, 0] / np.sum(one.q_nope[4, 0].astype(float) ** 2) / SCALE
    answer = _exact(scene([_with_keys(one, ckv, np.zeros((5, 2)))], [4]))
    np.testing.assert_allclose(answer.out[0, 0], ckv[3], rtol=1e-6)
    np.testing.assert_allclose(answer.lse[0, 0], 1e3, rtol=1e-6)


def test_a_single_key_is_returned_as_it_is():
    """S-4, S-5: the first token of a prompt sees itself alone, with weight 1."""
    one = request(1, 3, "bfloat16")
    made = scene([one], [0], dtype="bfloat16")
    answer = attend(made.problem, made.batch, made.image, Rounding.SPEC)
    assert answer.out[0].tolist() == [one.ckv[0].astype(float).tolist()] * 2


def test_the_rotated_part_is_scored_and_never_returned():
    """S-5: k_pe decides between keys; values are the latent alone."""
    one = request(3, 4)
    k_pe = np.zeros((3, 2))
    k_pe[1] = 1e3 * one.q_pe[2, 0]
    answer = _exact(scene([_with_keys(one, one.ckv, k_pe)], [2]))
    np.testing.assert_allclose(answer.out[0, 0], one.ckv[1], rtol=1e-6)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4),
    block_size=st.integers(1, 5),
    seed=st.integers(0, 999),
    is_causal=st.booleans(),
)
def test_against_plain_loops(rows, block_size, seed, is_causal):
    """S-1, S-4, S-5, S-7: any mix of rows equals one number at a time over dense keys."""
    requests = [request(c + q, seed + i) for i, (c, q) in enumerate(rows)]
    contexts = [context for context, _ in rows]
    mask = Mask.CAUSAL if is_causal else Mask.NON_CAUSAL
    answer = _exact(scene(requests, contexts, block_size=block_size, placement=seed, mask=mask))
    start = 0
    for one, context in zip(requests, contexts, strict=True):
        queries = range(context, len(one))
        out, lse = loops(one, queries, causal if is_causal else lambda _q, _k: True)
        np.testing.assert_allclose(answer.out[start : start + len(queries)], out, atol=1e-10)
        np.testing.assert_allclose(answer.lse[start : start + len(queries)], lse, atol=1e-10)
        start += len(queries)


def test_a_tree_against_plain_loops():
    """S-4: siblings read the context and their own branch."""
    parents = [None, 0, 0, 1, 2, 2]
    tree = np.eye(6, dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        tree[node] |= tree[parent]
    one = request(10, 5)
    answer = _exact(scene([one], [4], mask=Mask.TREE, tree=tree.ravel()))

    def sees(query, key):
        return key < 4 or bool(tree[query - 4, key - 4])

    out, lse = loops(one, range(4, 10), sees)
    np.testing.assert_allclose(answer.out, out, atol=1e-10)
    np.testing.assert_allclose(answer.lse, lse, atol=1e-10)


def test_queries_turn_at_their_positions():
    """S-3, S-12: with a rope, the query at position p meets cached keys turned by p radians."""
    one = request(5, 6)
    made = scene([one], [3])
    problem = replace(made.problem, rope=Rope(RopePairing.INTERLEAVED))
    answer = attend(problem, made.batch, made.image, Rounding.EXACT)
    as_complex = one.q_pe[..., 0] + 1j * one.q_pe[..., 1].astype(float)
    turned = as_complex * np.exp(1j * np.arange(5))[:, None]
    by_hand = replace(one, q_pe=np.stack([turned.real, turned.imag], axis=2))
    np.testing.assert_allclose(answer.out, loops(by_hand, [3, 4], causal)[0], atol=1e-10)


def test_nothing_visible():
    """S-6: padded rows and tokens have out 0 and lse -inf, for any inputs."""
    made = scene([request(2, 1), request(6, 2)], [0, 4])
    nan = np.full((2, *made.batch.q_nope.shape[1:]), np.nan, np.float32)
    batch = replace(
        made.batch,
        seq_lens=np.array([0, 6], np.int32),
        q_nope=np.concatenate([nan, made.batch.q_nope[2:], nan]),
        q_pe=np.concatenate([made.batch.q_pe, made.batch.q_pe[:2] * np.inf]),
        ckv=np.concatenate([made.batch.ckv, made.batch.ckv[:2]]),
        k_pe=np.concatenate([made.batch.k_pe, made.batch.k_pe[:2]]),
    )
    answer = attend(made.problem, batch, made.image, Rounding.SPEC)
    for padded in (slice(0, 2), slice(4, 6)):
        assert not answer.out[padded].any()
        assert np.isneginf(answer.lse[padded]).all()
        assert not answer.score_bound[padded].any()
    assert np.isfinite(answer.lse[2:4]).all()


def test_only_selected_tokens_are_computed():
    """S-5, S-6: the other tokens are NaN, unless they see no key."""
    made = scene([request(2, 1), request(6, 2), request(5, 3)], [0, 4, 3])
    batch = replace(made.batch, seq_lens=np.array([0, 6, 5], np.int32))
    asked = np.array([False, False, True, False, False, False])
    found = attend(made.problem, batch, made.image, asked=asked)
    whole = attend(made.problem, batch, made.image)
    assert np.array_equal(found.out[2], whole.out[2])
    assert np.array_equal(found.lse[2], whole.lse[2])
    assert np.isnan(found.out[3:]).all()
    assert np.isnan(found.lse[3:]).all()
    assert not found.out[:2].any()
    assert np.isneginf(found.lse[:2]).all()


@settings(derandomize=True, deadline=None, max_examples=20)
@given(pattern=st.integers(0, 2**32 - 1))
def test_unread_memory_may_hold_any_bits(pattern):
    """S-9: slots past a row's length and free blocks never reach a result."""
    requests = [request(5, 1), request(3, 2)]
    clean = scene(requests, [4, 0])
    cells = clean.image.blocks.view(np.uint32).reshape(-1, 4, 6).copy()
    cells[np.isnan(cells.view(np.float32))] = pattern
    dirty = image_of(clean.problem, cells)
    answer = attend(clean.problem, clean.batch, dirty, Rounding.SPEC)
    expected = attend(clean.problem, clean.batch, clean.image, Rounding.SPEC)
    assert answer.out.tobytes() == expected.out.tobytes()
    assert answer.lse.tobytes() == expected.lse.tobytes()


def test_more_queries_than_keys():
    """S-2, S-4: without a causal mask every query of a row of 2 keys sees both keys."""
    one = request(5, 1)
    made = scene([one, request(6, 2)], [0, 4], mask=Mask.NON_CAUSAL)
    short = replace(made.batch, seq_lens=np.array([2, 6], np.int32))
    found = attend(made.problem, short, made.image, Rounding.EXACT)
    keys = one.cut(0, 2)
    asked = replace(keys, q_nope=one.q_nope, q_pe=one.q_pe)
    out, lse = loops(asked, range(5), lambda *_: True)
    np.testing.assert_allclose(found.out[:5], out)
    np.testing.assert_allclose(found.lse[:5], lse)
    np.testing.assert_allclose(found.out[5:], _exact(made).out[5:])


def test_rows_without_queries():
    """S-2: a row without queries has no tokens and does not change the other rows."""
    with_idle = _exact(scene([request(5, 1), request(7, 2), request(6, 3)], [4, 7, 4]))
    assert with_idle.out.shape[0] == 3
    np.testing.assert_allclose(with_idle.out[1:], loops(request(6, 3), [4, 5], causal)[0])


def test_no_row_and_no_token():
    """S-2: an empty step has an empty output."""
    assert _exact(scene([], [])).out.shape == (0, 2, 4)


def test_bounds_on_the_way():
    """S-5: score_bound is the largest sum of |products|, value_bound the largest |latent|."""
    one = request(4, 7)
    answer = _exact(scene([one], [3]))
    q = np.concatenate([one.q_nope[3], one.q_pe[3]], axis=1).astype(float)
    k = np.concatenate([one.ckv, one.k_pe], axis=1).astype(float)
    sums = [[SCALE * sum(abs(q[h] * k[j])) for j in range(4)] for h in range(2)]
    np.testing.assert_allclose(answer.score_bound[0], np.max(sums, axis=1), rtol=1e-12)
    assert answer.value_bound[0].tolist() == [np.abs(one.ckv).max()] * 2


@pytest.mark.parametrize(("dtype", "spacing"), [("bfloat16", 2**-7), ("float16", 2**-10)])
def test_what_another_rounding_of_a_rotated_element_moves(dtype, spacing):
    """S-12: an ulp of it times what it meets; nothing moves where nothing is rotated."""
    one = request(4, 7, dtype)
    made = scene([one], [3], dtype=dtype)
    assert not _exact(made).turn_error.any()
    rope = Rope(RopePairing.INTERLEAVED)
    found = _exact(replace(made, problem=replace(made.problem, rope=rope)))
    q = rotate(one.q_pe[3:].astype(float), np.array([3]), rope)[0]
    k = one.k_pe.astype(float)
    products = [max(abs(q[h, i] * k[j, i]) for i in range(2) for j in range(4)) for h in range(2)]
    expected = [SCALE * spacing * product for product in products]
    np.testing.assert_allclose(found.turn_error[0], expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounding_stays_near_the_exact_output(dtype):
    """S-5, S-7: rounded outputs are values of the dtype and have an error of a few ulps."""
    made = scene([request(40, 8, dtype)], [20], dtype=dtype)
    exact = _exact(made)
    rounded = attend(made.problem, made.batch, made.image, Rounding.SPEC)
    output = rounded.output(dtype)
    assert output.out.astype(float).tolist() == rounded.out.tolist()
    assert output.lse.astype(float).tolist() == rounded.lse.tolist()
    ulp = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-23}[dtype]
    assert 0 < np.abs(rounded.out - exact.out).max() < 2 * ulp * np.abs(exact.out).max()
    np.testing.assert_allclose(rounded.lse, exact.lse, atol=1e-5)


def test_lse_is_float32_for_every_dtype():
    """S-7: an lse of 1000.25 keeps its fraction in a bfloat16 problem."""
    made = scene([request(1, 1, "bfloat16")], [0], dtype="bfloat16")
    problem = replace(made.problem, softmax_scale=1.00025)
    batch = replace(made.batch, q_nope=np.full_like(made.batch.q_nope, 250))
    cells = np.zeros((problem.num_blocks, 4, 6), batch.ckv.dtype)
    cells[..., :4] = 1  # score 4 * 250 * 1.00025
    lse = attend(problem, batch, image_of(problem, cells), Rounding.SPEC).lse
    assert lse.tolist() == [[1000.25, 1000.25]]
