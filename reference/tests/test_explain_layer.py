"""A dumped layer, between its projections: what is broken, and what explains it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dumped import case, changed, dumped

from paged_mla_reference.explain.checks.step import Step
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.explain.render.trace import trace_of
from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.oracle import RIGHT
from paged_mla_shared.dump import Dump, load_dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.problem import Rope, RopePairing

ANSWER = ("layer_out", "layer_lse")


def without(dump: Dump, *names: str) -> Dump:
    return replace(dump, arrays={n: x for n, x in dump.arrays.items() if n not in names})


def layered(name: str = "", dtype: str = "float32", **fields: Any) -> Dump:
    """Return a step of a layer, and what the rules or a fault made of it.

    Two of five rows are absorbed; the keys of the others come in two parts.
    """
    of = case(num_heads=2, **fields)
    dump = without(dumped(dtype=dtype, of=of), "q_nope", "out", "lse")
    problem, dims = dump.problem, dump.problem.dims
    rng = np.random.default_rng(0)
    tokens, lines = len(dump.arrays["q_pe"]), 2 * (dims.qk_nope_head_dim + dims.v_head_dim)
    q_nope = rng.standard_normal((tokens, 2, dims.qk_nope_head_dim))
    weights = rng.standard_normal((lines, dims.kv_lora_rank)) * dims.kv_lora_rank**-0.5
    dump = changed(
        dump,
        layer_q_nope=q_nope.astype(dump.arrays["q_pe"].dtype),
        kv_b_proj=weights.astype(dump.arrays["q_pe"].dtype),
        absorbed_rows=np.array(2, np.int32),
        workspace=np.array(70, np.int64),
    )
    step = Step.of(dump)
    assert step.layer is not None
    assert step.after is not None
    oracle = CATALOGUE[name].change(RIGHT) if name else RIGHT
    answer = oracle.layer(problem, step.layer, step.after)
    return changed(dump, layer_out=answer.out, layer_lse=answer.lse)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rope", [None, Rope(RopePairing.NEOX)])
def test_a_right_layer(tmp_path: Path, dtype: str, rope: Rope | None):
    """S-21: nothing is broken, nothing undecided, before and after a file of version 3."""
    dump = layered(dtype=dtype, rope=rope, padded_tokens=3)
    assert explain(dump).verdict == "No rule is broken."
    save_dump(dump, tmp_path / "x.safetensors")
    assert b'"paged_mla_dump":"3"' in (tmp_path / "x.safetensors").read_bytes()[:9999]
    found = explain(load_dump(tmp_path / "x.safetensors")).found
    assert [f.what for f in found.findings if f.stage == "layer"] == ["out", "lse"]
    assert found.first is None


@pytest.mark.parametrize("name", [
    "chunks-past-the-first-are-dropped",
    "chunks-are-merged-in-another-base",
    "materialized-rows-are-answered-first",
    "weights-are-split-in-halves",
])  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_layers_are_named(name: str, dtype: str):
    found = explain(layered(name, dtype))
    assert found.found.first is not None
    assert found.found.first.rule == "S-21"
    assert [fit.hypothesis.name for fit in found.best] == [name]


def test_an_output_that_is_nan():
    """S-9: it is found although no number of it can be compared."""
    dump = layered()
    for name in ANSWER:
        spoilt = dump.arrays[name].copy()
        spoilt[0] = np.nan
        first = explain(changed(dump, **{name: spoilt})).found.first
        assert first is not None
        assert (first.rule, first.what) == ("S-9", name.removeprefix("layer_"))


def test_parts_of_a_layer():
    """Missing arrays are reported; the fields about the kind of computation are optional."""
    dump = layered("weights-are-split-in-halves")
    found = explain(without(dump, "absorbed_rows", "workspace"))
    assert found.best[0].hypothesis.name == "weights-are-split-in-halves"
    found = explain(without(dump, "layer_lse", "cache_before"))
    assert found.is_broken
    assert "the dump has no layer_lse" in [f.detail for f in found.found.findings]
    for name in ("kv_b_proj", "cache_after"):
        lacking = (name, "cache_before", "block_ids") if name == "cache_after" else (name,)
        found = explain(without(dump, *lacking))
        assert not found.is_broken
        assert name in found.found.findings[-1].detail
    found = explain(without(dump, *ANSWER))
    assert found.found.findings[-1].detail == "the dump has no layer_out or layer_lse"


def test_a_layer_has_no_intermediate_values():
    """S-21: its queries are not absorbed, so they have no scores with cached latents."""
    with pytest.raises(InvalidArgument, match="a dump of a whole layer, whose queries are not"):
        trace_of(without(layered(), "q_nope"), 0, 0)


def test_a_layer_without_a_budget():
    """Products of 8 bits are not called wrong, nor right."""
    found = explain(replace(layered("weights-are-split-in-halves"), products="fast"))
    assert not found.is_broken
    assert "exact products" in found.found.findings[-1].detail


def test_layers_that_no_rule_allows():
    """S-21: a workspace for less than a step's tokens is named; what is too large is left out."""
    found = explain(changed(layered(), workspace=np.array(1, np.int64)))
    assert "S-21 is broken in workspace" in found.verdict
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paged_mla_reference.explain.checks.layer_checks.MOST_ELEMENTS", 100)
        found = explain(layered())
    assert "dump fewer rows or heads" in found.found.findings[-1].detail
