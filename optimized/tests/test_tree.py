import pytest
import torch
from mla_step import assert_close, build, dense

ROWS = ((70, 8), (3, 3), (0, 0), (45, 40))


def random_forest(nodes, generator):
    """Return the ancestor-or-self matrix of random trees side by side, bool [nodes, nodes]."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(-1, node, (), generator=generator))
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def trees():
    generator = torch.Generator().manual_seed(3)
    return [random_forest(query_len, generator) for _, query_len in ROWS]


def with_context(matrices):
    """Return what each query sees of all keys: the whole context and its own ancestors."""
    return [
        torch.cat([torch.ones(q, s - q, dtype=torch.bool), sees], dim=1)
        for (s, q), sees in zip(ROWS, matrices, strict=True)
    ]


def spell(matrices, spelling):
    if spelling == "tree:qlen":
        return torch.cat([sees.ravel() for sees in matrices])
    if spelling == "tree:full":
        return torch.cat([sees.ravel() for sees in with_context(matrices)])
    lines = torch.zeros(sum(map(len, matrices)), 6, dtype=torch.uint8)
    for token, line in enumerate(line for sees in matrices for line in sees):
        for node in line.nonzero()[:, 0].tolist():
            lines[token, node // 8] |= 1 << node % 8
    return lines


@pytest.mark.parametrize("spelling", ["tree:qlen", "tree:full", "tree:packed"])
def test_drafts_see_context_and_ancestors(spelling):
    """S-4, S-14: every spelling of one mask gives the same attention; 40 drafts take two words."""
    step = build(*ROWS, mask=spelling, max_draft_tokens=40)
    step.mask = spell(trees(), spelling)
    assert_close(step.attend(), dense(step, with_context(trees())))


def test_strided_mask():
    """S-14: a packed mask that is a view of a wider buffer."""
    step = build(*ROWS, mask="tree:packed", max_draft_tokens=40)
    step.mask = spell(trees(), "tree:packed")
    expected = step.attend()
    wide = torch.full((len(step.mask), 9), 255, dtype=torch.uint8)
    wide[:, :6] = step.mask
    step.mask = wide[:, :6]
    assert torch.equal(step.attend()[0], expected[0])


def test_a_sibling_leaves_no_trace():
    """S-4: a changed draft changes the bits of its descendants only."""
    step = build((20, 4), mask="tree:qlen", max_draft_tokens=4)
    step.mask = torch.tensor(
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool
    ).ravel()
    before, _ = step.attend()
    step.cache[step.block_table[0, 1], 18 % 16] += 1.0  # the third draft
    after, _ = step.attend()
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2], after[2])
    assert not torch.equal(before[3], after[3])
