"""Drafts in the simulator: trees, branches through the cache, windows."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from simulator_runs import ask, run

from paged_mla_reference.rules.drafts import commit, draft_view, extend_window
from paged_mla_reference.simulator.batches import lay_out
from paged_mla_reference.simulator.config import DraftKind, Drafts, EngineConfig
from paged_mla_reference.simulator.speculation import accepted_path, draft_branches, tree_of
from paged_mla_reference.simulator.step import Kind

TREES = Drafts(kind=DraftKind.TREE, depth=3, branches=3, acceptance=0.7)


def test_a_tree_by_hand():
    """S-14: equal beginnings share a path, and nodes are ordered by level."""
    tokens, parents = tree_of(9, [(1, 2, 3), (1, 4, 5), (6, 7, 8)])
    assert tokens == (9, 1, 6, 2, 4, 7, 3, 5, 8)
    assert parents == (-1, 0, 0, 1, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(
    ("truth", "path"),
    [((1, 4, 5, 7), [1, 4, 7]), ((1, 2), [1, 3]), ((6, 2), [2]), ((5,), []), ((), [])],
    ids=["all", "truth-ends", "some", "none", "nothing-left"],
)
def test_what_is_accepted_is_the_true_path(truth: tuple[int, ...], path: list[int]):
    """S-14: acceptance follows the tree from the root while the model generates the same tokens."""
    tokens, parents = tree_of(9, [(1, 2, 3), (1, 4, 5), (6, 7, 8)])
    assert accepted_path(tokens, parents, truth) == path


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_branches_follow_the_truth(acceptance: float):
    """S-15: with probability 1 a branch is right to its end, with 0 none begins right."""
    drafts = Drafts(kind=DraftKind.TREE, depth=3, branches=4, acceptance=acceptance)
    branches = draft_branches((1, 2, 3, 4), drafts, random.Random(0))
    assert [len(branch) for branch in branches] == [3, 3, 3, 3]
    assert ((1, 2, 3) in branches) == bool(acceptance)


def test_draft_rows_are_the_view_of_the_rules():
    """S-15: rows of branch steps have the lengths and blocks of ``draft_view``."""
    drafts = Drafts(kind=DraftKind.TREE, depth=3, branches=2, multi_step=True)
    config = EngineConfig(block_size=4, num_blocks=40, drafts=drafts)
    _, steps = run(config, [ask("a", 5, 8), ask("b", 9, 8)])
    round_of_drafts = [step for step in steps if step.rows[0].kind is Kind.DRAFT][:3]
    first = round_of_drafts[0].rows
    assert [len(row.tokens) - 2 for row in first] == [1, 1, 1, 1]  # partial block, root, draft
    prefix_lens = np.array([first[0].committed + 1, first[2].committed + 1], np.int32)
    prefix_table = np.array([first[0].blocks[:2], first[2].blocks[:2]], np.int32)
    own = np.array([[row.blocks[row.committed // 4 :] for row in first]], np.int32)
    own = own.reshape(2, 2, -1)
    for i, step in enumerate(round_of_drafts):
        layout = lay_out(step.rows)
        view = draft_view(prefix_lens, prefix_table, own, step=i + 1, block_size=4)
        assert layout.seq_lens.tolist() == view.seq_lens.tolist()
        for mine, theirs, seq_len in zip(
            layout.block_table, view.block_table, view.seq_lens, strict=True
        ):
            used = -(-int(seq_len) // 4)
            assert mine[:used].tolist() == theirs[:used].tolist()
        if i:
            assert layout.cu_seqlens_q.tolist() == view.cu_seqlens_q.tolist()


def test_branches_share_no_writable_block():
    """S-15: all blocks from a branch's first query token on are its own."""
    drafts = Drafts(kind=DraftKind.TREE, depth=4, branches=3, multi_step=True)
    config = EngineConfig(block_size=4, num_blocks=60, drafts=drafts)
    _, steps = run(config, [ask("a", 6, 6), ask("b", 3, 6)])
    rows = [step.rows for step in steps if step.rows and step.rows[0].kind is Kind.DRAFT]
    assert rows
    for branch_rows in rows:
        written = [row.blocks[row.context_len // 4 :] for row in branch_rows]
        flat = [block for blocks in written for block in blocks]
        assert len(set(flat)) == len(flat)


def test_windows_are_those_of_the_rules():
    """S-16: after a tree every request runs depth + 1 tokens from its committed length."""
    config = EngineConfig(block_size=4, num_blocks=40, drafts=TREES)
    _, steps = run(config, [ask("a", 5, 30), ask("b", 9, 30)])
    windows = 0
    for step, then in pairwise(steps):
        rows = [row for row in step.rows if row.kind is Kind.WINDOW]
        if len(rows) < 2:
            continue
        windows += 1
        layout, committed = (
            lay_out(tuple(rows)),
            np.array([row.committed for row in rows], np.int32),
        )
        seq_lens, cu_seqlens_q = extend_window(committed, TREES.window)
        assert layout.seq_lens.tolist() == seq_lens.tolist()
        assert layout.cu_seqlens_q.tolist() == cu_seqlens_q.tolist()
        after = {row.request.id: row.committed for row in then.rows}
        if len(after) == 2:
            kept = np.array([after[row.request.id] for row in rows], np.int32) - committed
            assert (commit(committed, kept, TREES.window) - committed).tolist() == kept.tolist()
    assert windows > 3


def test_a_verified_tree_computes_its_root_only():
    """S-16: the next row starts right after the root, for any accepted tokens."""
    config = EngineConfig(block_size=4, num_blocks=40, drafts=TREES)
    _, steps = run(config, [ask("a", 5, 30)])
    pairs = [(s.rows[0], t.rows[0]) for s, t in pairwise(steps)]
    trees = [(row, then) for row, then in pairs if row.kind is Kind.TREE]
    assert trees
    assert all(then.committed == row.committed + 1 for row, then in trees)
    assert all(then.kind is Kind.WINDOW for _, then in trees)
