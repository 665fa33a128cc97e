"""The output of a token depends only on its request (S-19) and not on the schedule (S-20)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_scenes import request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.problem import Mask

SETTINGS = settings(derandomize=True, deadline=None, max_examples=20)


def _answer(requests, contexts, **layout):
    made = scene(requests, contexts, **layout)
    return attend(made.problem, made.batch, made.image, Rounding.EXACT)


def _same(left, right):
    np.testing.assert_allclose(left.out, right.out, atol=1e-12)
    np.testing.assert_allclose(left.lse, right.lse, atol=1e-12)


@SETTINGS
@given(placement=st.integers(1, 10**6), block_size=st.integers(1, 7))
def test_blocks_may_be_anywhere_and_of_any_size(placement, block_size):
    """S-19: other block ids or another block size change no output."""
    requests, contexts = [request(11, 1), request(6, 2)], [7, 0]
    moved = _answer(requests, contexts, placement=placement, block_size=block_size)
    _same(moved, _answer(requests, contexts))


@SETTINGS
@given(order=st.permutations(range(4)))
def test_order_of_requests(order):
    """S-19: permuting the rows of a step permutes its outputs."""
    requests, contexts = [request(3 + i, i) for i in range(4)], [2, 3, 0, 5]
    stretches = [_answer([requests[i]], [contexts[i]]) for i in order]
    together = _answer([requests[i] for i in order], [contexts[i] for i in order])
    np.testing.assert_allclose(together.out, np.concatenate([a.out for a in stretches]))
    np.testing.assert_allclose(together.lse, np.concatenate([a.lse for a in stretches]))


@SETTINGS
@given(cuts=st.sets(st.integers(1, 12)), block_size=st.sampled_from([1, 4]))
def test_chunking_a_prompt(cuts, block_size):
    """S-19: a prompt of 13 tokens computed at once or in any chunks."""
    one = request(13, 3)
    ends = [*sorted(cuts), 13]
    chunks = [
        _answer([one.cut(0, end)], [start], block_size=block_size)
        for start, end in zip([0, *ends], ends, strict=False)
    ]
    whole = _answer([one], [0])
    np.testing.assert_allclose(np.concatenate([c.out for c in chunks]), whole.out, atol=1e-12)
    np.testing.assert_allclose(np.concatenate([c.lse for c in chunks]), whole.lse, atol=1e-12)


@SETTINGS
@given(changed=st.integers(0, 8), seed=st.integers(1, 99))
def test_later_tokens_change_nothing_before_them(changed, seed):
    """S-4: replacing a token leaves every earlier token's bits, and changes all from it on."""
    one, other = request(9, 4), request(9, seed + 100)
    spoilt = one.cut(0, changed).followed_by(other.cut(changed, changed + 1))
    spoilt = spoilt.followed_by(one.cut(changed + 1, 9))
    before, after = _answer([one], [0]), _answer([spoilt], [0])
    assert before.out[:changed].tobytes() == after.out[:changed].tobytes()
    assert (before.lse[changed:] != after.lse[changed:]).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_batch_mates_keep_the_bits(dtype):
    """S-20: a row has the same bits alone and among others."""
    one, mates = request(9, 5, dtype), [request(5, 6, dtype), request(12, 7, dtype)]
    alone = scene([one], [6], dtype=dtype)
    among = scene([mates[0], one, mates[1]], [4, 6, 3], dtype=dtype, placement=3)
    left = attend(alone.problem, alone.batch, alone.image, Rounding.SPEC)
    right = attend(among.problem, among.batch, among.image, Rounding.SPEC)
    assert left.out.tobytes() == right.out[1:4].tobytes()
    assert left.lse.tobytes() == right.lse[1:4].tobytes()


def test_a_chain_is_a_causal_row():
    """S-4, S-14: a tree in which every node has one child is causal attention."""
    one = request(9, 6)
    chain = np.tril(np.ones((5, 5), bool)).ravel()
    _same(_answer([one], [4], mask=Mask.TREE, tree=chain), _answer([one], [4]))


def test_two_rows_may_read_one_prefix():
    """S-13, S-19: rows that share physical blocks have the same outputs as rows that do not."""
    prefix = request(8, 7)
    left = prefix.followed_by(request(2, 8))
    right = prefix.followed_by(request(3, 9))
    made = scene([left, right], [8, 8])
    table = made.batch.block_table.copy()
    table[1, :2] = table[0, :2]
    shared = replace(made.batch, block_table=table)
    _same(
        attend(made.problem, shared, made.image, Rounding.EXACT),
        attend(made.problem, made.batch, made.image, Rounding.EXACT),
    )
