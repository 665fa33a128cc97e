"""Capabilities are closed: a value that is not listed is not declared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_shared.backend import Capabilities, mask_name
from paged_mla_shared.cases import GROUPS
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Mask, MaskSpelling, Problem


@pytest.fixture
def problem() -> Problem:
    return GROUPS["rope"][0].problem(SMALL, "bfloat16")


def test_an_empty_declaration_covers_nothing(problem: Problem):
    """Every property of the problem is reported as not declared."""
    unmet = Capabilities().unmet(problem, ["attend"], ["padding"])
    for word in ("dtype", "cache_format", "block_size", "num_heads", "mask", "rope"):
        assert any(word in phrase for phrase in unmet), word
    assert "op attend not declared" in unmet
    assert "feature padding not declared" in unmet


def test_a_sufficient_declaration_has_no_unmet_needs(problem: Problem):
    """A declaration of the problem's values has no unmet needs."""
    capabilities = Capabilities(
        ops=frozenset({"attend"}),
        dtypes=frozenset({"bfloat16"}),
        cache_formats=frozenset({"bf16"}),
        block_sizes=frozenset({problem.block_size}),
        num_heads=frozenset({problem.dims.num_heads}),
        head_dims=frozenset({(32, 16)}),
        masks=frozenset({"causal"}),
        ropes=frozenset({"interleaved"}),
    )
    assert capabilities.unmet(problem, ["attend"], []) == []


def test_a_prefill_needs_its_head_dims(problem: Problem):
    """S-21: N, P and V are only needed by this op, and the phrase has its name."""
    narrow = Capabilities(ops=frozenset({"prefill"}), prefill_dims=frozenset({(128, 64, 128)}))
    fitting = replace(narrow, prefill_dims=frozenset({(16, 16, 16)}))
    [phrase] = set(narrow.unmet(problem, ["prefill"], [])) - set(fitting.unmet(problem, [], []))
    assert phrase == "prefill of (N, P, V) (16, 16, 16) not declared"
    assert fitting.unmet(problem, ["prefill"], []) == narrow.unmet(problem, ["merge"], [])[:-1]


@pytest.mark.parametrize("spelling", MaskSpelling)
def test_tree_masks_are_declared_by_spelling(spelling: MaskSpelling):
    """S-14: a backend may read one spelling and not another."""
    case = next(c for c in GROUPS["masks"] if c.mask_spelling is spelling and c.mask is Mask.TREE)
    assert mask_name(case.problem(SMALL, "float32")) == f"tree:{spelling}"
