"""Cases of trees: changing a node must only change nodes that see it (S-4, S-14)."""

from __future__ import annotations

from paged_mla_shared.cases.case import Case, Row, Tree
from paged_mla_shared.problem import Mask

GROUP = "siblings"
PRODUCTION = {"keys": 4096, "tree": 64}


def _tree(name: str, why: str, tree: Tree, rows: tuple[Row, ...], num_heads: int = 8) -> Case:
    return Case(
        group=GROUP,
        name=name,
        why=why,
        rules=("S-4", "S-14"),
        rows=rows,
        num_heads=num_heads,
        mask=Mask.TREE,
        tree=tree,
    )


CASES = (
    _tree("star", "siblings of one parent", Tree.STAR, (Row(70, 8),)),
    _tree("n64", "wide trees", Tree.RANDOM, (Row(4164, 64), Row(33, 33)), 1),
    _tree("random", "branches of any depth", Tree.RANDOM, (Row(70, 16), Row(140, 9))),
)
