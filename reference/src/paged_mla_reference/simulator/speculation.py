"""Drafts of the next tokens of a model, and the number of accepted drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence

from paged_mla_reference.simulator.config import Drafts

VOCABULARY = 1 << 16


def draft_branches(
    truth: Sequence[int], drafts: Drafts, rng: random.Random
) -> list[tuple[int, ...]]:
    """Return branches of ``drafts.depth`` tokens each.

    One branch follows `truth`, the tokens that the model will generate, for a random number of
    tokens. Each other branch leaves an earlier branch at a random depth.
    """
    right = 0
    while right < min(drafts.depth, len(truth)) and rng.random() < drafts.acceptance:
        right += 1
    branches = [_completed(truth[:right], drafts.depth, rng)]
    while len(branches) < drafts.branches:
        stem = rng.choice(branches)[: rng.randrange(drafts.depth)]
        branches.append(_completed(stem, drafts.depth, rng))
    rng.shuffle(branches)
    return branches


def tree_of(
    root: int, branches: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens and parents of the tree that the branches form below `root`.

    Branches with equal beginnings share a path. Nodes are ordered by level, so parents precede
    their children, and the nodes of an accepted path are seldom contiguous.
    """
    tokens, parents = [root], [-1]
    at = [0] * len(branches)  # node that each branch has reached
    for level in range(len(branches[0])):
        children: dict[tuple[int, int], int] = {}
        for j, branch in enumerate(branches):
            child = at[j], branch[level]
            if child not in children:
                children[child] = len(tokens)
                tokens.append(branch[level])
                parents.append(at[j])
            at[j] = children[child]
    return tuple(tokens), tuple(parents)


def accepted_path(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> list[int]:
    """Return the nodes below node 0 whose tokens the model generates next, in order."""
    nodes = enumerate(zip(parents, tokens, strict=True))
    children = {parent_and_token: node for node, parent_and_token in nodes}
    path: list[int] = []
    node = 0
    for token in truth:
        if (node, token) not in children:
            break
        node = children[node, token]
        path.append(node)
    return path


def _completed(stem: Sequence[int], depth: int, rng: random.Random) -> tuple[int, ...]:
    return (*stem, *(rng.randrange(VOCABULARY) for _ in range(depth - len(stem))))
