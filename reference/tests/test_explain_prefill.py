"""A dumped prefill, and dumped queries of 8 bits: what is broken, and what explains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dumped import changed

from paged_mla_reference.explain.checks.prefill_checks import MOST
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.faults import CATALOGUE
from paged_mla_reference.oracle import RIGHT, Oracle
from paged_mla_shared.cases import Row
from paged_mla_shared.cases.prefill import PrefillCase
from paged_mla_shared.cases.queries import QueryCase
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dump import Dump, load_dump, save_dump
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Rope, RopePairing
from paged_mla_shared.query_inputs import build_queries

OF_CASE = {"name": "x", "why": "x", "rules": ("S-21",), "num_heads": 2}
ROWS = (Row(20, 5), Row(9, 9), Row(3, 5), Row(0, 2))


def wrong_oracle(name: str) -> Oracle:
    return CATALOGUE[name].change(RIGHT) if name else RIGHT


def prefilled(name: str = "", dtype: str = "float32", *, causal: bool = True) -> Dump:
    """Return a prefill, and what an oracle or a fault made of it."""
    case = PrefillCase(group="prefill", rows=ROWS, causal=causal, padded_tokens=2, **OF_CASE)
    [batch] = build_prefills(case, SMALL, dtype)
    problem = case.problem(SMALL, dtype)
    answer = wrong_oracle(name).prefill(problem, batch)
    arrays: dict[str, Any] = {f"prefill_{name}": array for name, array in vars(batch).items()}
    arrays |= {"prefill_causal": np.array(causal)}
    arrays |= {"prefill_out": answer.out, "prefill_lse": answer.lse}
    return Dump(problem=problem, arrays=arrays)


def quantized(name: str = "", scale: float | None = None, rope: Rope | None = None) -> Dump:
    """Return queries, and the codes and scales that an oracle or a fault made of them."""
    case = QueryCase(
        group="queries", rows=(Row(37, 5), Row(0, 1), Row(75, 3)), scale=scale, uneven=True,
        rope=rope, **OF_CASE,
    )  # fmt: skip
    [batch] = build_queries(case, SMALL, "float32")
    problem = case.problem(SMALL, "float32")
    codes, scales = wrong_oracle(name).quantize_queries(problem, batch, scale)
    arrays = {name: x for name, x in vars(batch).items() if x is not None and name in KEPT}
    arrays |= {"query_codes": codes, "query_scales": scales}
    if scale is not None:
        arrays["query_scale"] = np.array(scale, np.float32)
    return Dump(problem=problem, arrays=arrays)


KEPT = ("cu_seqlens_q", "seq_lens", "q_nope", "q_pe")


def test_keys_that_are_nan():
    """S-9: a prefill over NaN returns NaN, and other rows are still checked."""
    dump = prefilled()
    dump.arrays["prefill_v"][2, 0, 3] = np.nan  # of row 0, which has queries 0 to 4
    dump.arrays["prefill_out"][:5, 0, 3] = np.nan
    found = explain(dump)
    assert not found.is_broken
    assert "undecided: out, lse of tokens with NaN" in found.verdict
    dump.arrays["prefill_lse"][5:] += 1
    assert explain(dump).is_broken


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_right_prefill(tmp_path: Path, dtype: str, *, causal: bool):
    """S-21: nothing is broken, nothing undecided, before and after a file."""
    dump = prefilled(dtype=dtype, causal=causal)
    assert explain(dump).verdict == "No rule is broken."
    save_dump(dump, tmp_path / "x.safetensors")
    assert explain(load_dump(tmp_path / "x.safetensors")).verdict == "No rule is broken."


@pytest.mark.parametrize(
    ("name", "rule", "causal"),
    [
        ("prefill-mask-is-top-left", "S-5", True),
        ("prefill-is-always-causal", "S-5", False),
        ("prefill-lse-is-in-base-2", "S-7", True),
        ("scale-is-of-the-part-without-position", "S-5", True),
        ("rows-without-context-weigh-as-much", "S-6", True),
    ],
)
def test_wrong_prefills_are_named(name: str, rule: str, *, causal: bool):
    """S-4 to S-7, S-21: the rule, and the fault."""
    found = explain(prefilled(name, causal=causal))
    assert found.found.first is not None
    assert found.found.first.rule == rule
    assert found.best[0].hypothesis.name == name


def test_parts_of_a_prefill():
    """Missing arrays are reported; an output without its lse is still checked."""
    dump = prefilled("prefill-lse-is-in-base-2")
    some = {name: x for name, x in dump.arrays.items() if name != "prefill_lse"}
    found = explain(Dump(problem=dump.problem, arrays=some))
    assert not found.is_broken
    assert "the dump has no prefill_lse" in [f.detail for f in found.found.findings]
    del some["prefill_v"]
    found = explain(Dump(problem=dump.problem, arrays=some))
    assert found.verdict.endswith("undecided: lengths, out, lse.")
    assert "prefill_v" in found.found.findings[-1].detail


def test_prefills_that_no_rule_allows():
    """S-2: lengths that reach past the keys are named; what is too large is left out."""
    sums = np.array([0, 20, 29, 32, 10_000], np.int32)
    found = explain(changed(prefilled(), prefill_cu_seqlens_k=sums))
    assert "S-2 is broken in cu_seqlens_k" in found.verdict
    keys = MOST // 2 // 5 + 1
    dump = prefilled()
    one = {"cu_seqlens_q": [0, 5, 5, 5, 5], "cu_seqlens_k": [0, *[keys] * 4]}
    huge: dict[str, Any] = {f"prefill_{n}": np.array(x, np.int32) for n, x in one.items()}
    dims = dump.problem.dims
    shapes = {"k_nope": (2, dims.qk_nope_head_dim), "k_pe": (dims.qk_rope_head_dim,)}
    shapes["v"] = (2, dims.v_head_dim)
    zero = np.zeros((), np.float32)
    huge |= {f"prefill_{n}": np.broadcast_to(zero, (keys, *s)) for n, s in shapes.items()}
    problem = dump.problem.__class__(**vars(dump.problem) | {"max_model_len": keys})
    found = explain(Dump(problem=problem, arrays={**dump.arrays, **huge}))
    assert "dump fewer rows or heads" in found.found.findings[-1].detail


@pytest.mark.parametrize("scale", [None, 0.03])
@pytest.mark.parametrize("rope", [None, Rope(RopePairing.NEOX)])
def test_right_queries(scale: float | None, rope: Rope | None):
    """S-11, S-12: codes of their own scales, and of one that was given."""
    found = explain(quantized(scale=scale, rope=rope))
    assert not found.is_broken
    assert "codes and scales of queries" in [f.what for f in found.found.findings]


@pytest.mark.parametrize(
    ("name", "scale", "rope"),
    [
        ("heads-of-a-query-share-a-scale", None, None),
        ("a-given-query-scale-is-ignored", 0.03, None),
        ("large-queries-become-nan", 0.001, None),
        ("queries-are-quantized-before-they-are-rotated", None, Rope(RopePairing.NEOX)),
    ],
)
def test_wrong_queries_are_named(name: str, scale: float | None, rope: Rope | None):
    """S-11, S-12: the fault is first."""
    found = explain(quantized(name, scale, rope))
    assert found.found.first is not None
    assert found.found.first.rule == "S-11"
    assert found.best[0].hypothesis.name == name


def test_a_scale_that_nothing_can_be_divided_by():
    """S-11: it is refused by name."""
    with pytest.raises(InvalidArgument, match="scale"):
        explain(changed(quantized(), query_scale=np.array(0, np.float32)))
