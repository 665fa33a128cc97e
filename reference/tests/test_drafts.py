"""Branches of a multi-step draft, and windows of a draft-extend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import causal, loops, request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.drafts import commit, copy_tails, draft_view, extend_window
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_shared.errors import InvalidArgument

PREFIXES = np.array([5, 8], np.int32)
TABLE = np.array([[3, 7, -1], [0, 6, -1]], np.int32)
BRANCHES = np.array([[[10, 11], [12, 13]], [[14, 15], [16, 17]]], np.int32)


def test_rows_of_one_step():
    """S-15: row (b, j) at step 2 reads prefix + 3 tokens, one query each."""
    view = draft_view(PREFIXES, TABLE, BRANCHES, step=2, block_size=4)
    assert view.seq_lens.tolist() == [8, 8, 11, 11]
    assert view.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]


def test_branches_share_full_blocks_only():
    """S-15: of 5 prefix tokens the first 4 are shared; the fifth is copied for each branch."""
    view = draft_view(PREFIXES, TABLE, BRANCHES, step=0, block_size=4)
    assert view.block_table[:, :4].tolist() == [
        [3, 10, 11, -1],
        [3, 12, 13, -1],
        [0, 6, 14, 15],
        [0, 6, 16, 17],
    ]


def test_every_request_has_room_for_its_branches():
    """S-15: a row has as many columns as a prefix table and a branch's blocks together."""
    view = draft_view(PREFIXES[:1], TABLE[:1], BRANCHES[:1], step=0, block_size=4)
    assert view.block_table.tolist() == [[3, 10, 11, -1, -1], [3, 12, 13, -1, -1]]


def _draft(branch_tokens, prefix, steps):
    """Run the branches of one request through all steps; return outputs [steps][branches]."""
    made = scene([prefix], [len(prefix)])
    problem = replace(made.problem, num_blocks=20)
    lens = np.array([len(prefix)], np.int32)
    blocks = np.arange(10, 10 + 2 * len(branch_tokens), dtype=np.int32)
    blocks = blocks.reshape(1, len(branch_tokens), 2)
    image = replace(made.image, layout=problem.layout)
    image = copy_tails(image, lens, made.batch.block_table, blocks)
    answers = []
    for step in range(steps):
        view = draft_view(lens, made.batch.block_table, blocks, step, 4)
        token = branch_tokens[0].cut(step, step + 1)
        for other in branch_tokens[1:]:
            token = token.followed_by(other.cut(step, step + 1))
        batch = replace(made.batch, **vars(view), **vars(token))
        image = append(problem, batch, image)
        answers.append(attend(problem, batch, image, Rounding.EXACT))
    return answers


@pytest.mark.parametrize("length", [4, 6, 7])
def test_a_branch_is_its_own_sequence(length):
    """S-15: branch j at step i equals plain causal attention over prefix and its drafts."""
    prefix, branches = request(length, 1), [request(3, 2), request(3, 3), request(3, 4)]
    answers = _draft(branches, prefix, 3)
    for j, branch in enumerate(branches):
        whole = prefix.followed_by(branch)
        for step in range(3):
            out, lse = loops(whole, [length + step], causal)
            np.testing.assert_allclose(answers[step].out[j], out[0], atol=1e-10)
            np.testing.assert_allclose(answers[step].lse[j], lse[0], atol=1e-10)


def test_a_sibling_changes_nothing():
    """S-15: other tokens in branch 1 leave every bit of branch 0."""
    prefix, mine = request(6, 1), request(3, 2)
    left = _draft([mine, request(3, 3)], prefix, 3)
    right = _draft([mine, request(3, 9)], prefix, 3)
    for before, after in zip(left, right, strict=True):
        assert before.out[0].tobytes() == after.out[0].tobytes()
        assert (before.out[1] != after.out[1]).all()


def test_window_lengths():
    """S-16: every request runs the whole window, for any number of accepted tokens."""
    seq_lens, cu_seqlens_q = extend_window(np.array([10, 3, 0], np.int32), 4)
    assert seq_lens.tolist() == [14, 7, 4]
    assert cu_seqlens_q.tolist() == [0, 4, 8, 12]
    assert (seq_lens.dtype, cu_seqlens_q.dtype) == (np.int32, np.int32)


def test_commit():
    """S-16: the next step starts after the accepted tokens; none is a legal number."""
    lens = commit(np.array([10, 3, 5], np.int32), np.array([4, 0, 1], np.int32), 4)
    assert lens.tolist() == [14, 3, 6]


@pytest.mark.parametrize("accepted", [-1, 5])
def test_commit_outside_the_window(accepted):
    """S-16: nothing past the window can have been accepted."""
    with pytest.raises(InvalidArgument, match="accepted"):
        commit(np.array([10], np.int32), np.array([accepted], np.int32), 4)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_what_was_rejected_leaves_no_trace(accepted):
    """S-16: after a window of 3, the next equals plain attention over the accepted tokens."""
    committed, first, second = request(5, 1), request(3, 2), request(3, 3)
    made = scene([committed.followed_by(first)], [5])
    kept = commit(np.array([5], np.int32), np.array([accepted], np.int32), 3)
    seq_lens, cu_seqlens_q = extend_window(kept, 3)
    table = made.batch.block_table.copy()
    table[0, 2] = next(b for b in range(made.problem.num_blocks) if b not in table[0, :2])
    batch = replace(
        made.batch,
        seq_lens=seq_lens,
        cu_seqlens_q=cu_seqlens_q,
        block_table=table,
        **vars(second),
    )
    image = append(made.problem, batch, made.image)
    answer = attend(made.problem, batch, image, Rounding.EXACT)
    history = committed.followed_by(first.cut(0, accepted)).followed_by(second)
    out, _ = loops(history, range(5 + accepted, 8 + accepted), causal)
    np.testing.assert_allclose(answer.out, out, atol=1e-10)
