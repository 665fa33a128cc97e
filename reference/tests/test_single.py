"""S-22: a query that sees one value gets that value."""

from __future__ import annotations

import numpy as np
import pytest

from paged_mla_reference.rules.attention import Answer, attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.masks import keys_seen
from paged_mla_reference.rules.materialize import materialize
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_reference.tolerance.compare import Mismatch, check_output
from paged_mla_reference.tolerance.single import (
    check_single,
    equal_values,
    keys_of_sums,
    lone_keys,
    slack,
)
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.cases.exact import SINGLE
from paged_mla_shared.cases.prefill import PrefillCase
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Output, Problem

DIMS = MlaDims(
    num_heads=4, kv_lora_rank=64, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32
)
HALF = ("bfloat16", "float16")


def answered(case: Case, dtype: str) -> tuple[Problem, Answer, Output, np.ndarray]:
    """Return a case's problem, its exact and rounded outputs, and the numbers of equal keys."""
    [step] = build_steps(case, DIMS, dtype)
    batch, before = materialize(step)
    problem, image = step.problem, append(step.problem, batch, before)
    exact, rounded = (attend(problem, batch, image, r) for r in (Rounding.EXACT, Rounding.SPEC))
    return (
        problem,
        exact,
        rounded.output(dtype),
        equal_values(problem, batch, image, keys_seen(problem, batch)),
    )


def case_of(*rows: Row, **more: object) -> Case:
    """Return a case of these rows."""
    return Case(group="exact", name="test", why="", rules=("S-22",), rows=rows, **more)


@pytest.mark.parametrize("dtype", [*HALF, "float32"])
@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_specification(case, dtype):
    """S-22: the rounded oracle returns single values, and each case has some."""
    problem, exact, rounded, counts = answered(case, dtype)
    assert check_single(problem, rounded, exact, counts)


def test_counts():
    """S-22: a causal query counts the equal keys up to its own; of different keys one counts."""
    rows = (Row(3, 3), Row(5, 1))
    assert answered(case_of(*rows), "float16")[3].tolist() == [1, 0, 0, 0]
    assert answered(case_of(*rows, equal_keys=True), "float16")[3].tolist() == [1, 2, 3, 5]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keys", [1, 5])
def test_raised_peaks(dtype, keys):
    """S-22: weights relative to an integer above the highest score do not cancel once rounded."""
    case = case_of(*(Row(keys, 1) for _ in range(8)), equal_keys=True)
    problem, exact, rounded, counts = answered(case, dtype)
    powers = exact.lse / np.log(2) - np.log2(keys)
    weights = np.exp2(powers - np.ceil(powers))
    share = widen(round_to(weights, dtype)) / weights
    raised = Output(round_to(exact.out * share[:, :, None], dtype), rounded.lse)
    with pytest.raises(Mismatch, match=r"S-22.*queries that see one value"):
        check_single(problem, raised, exact, counts)


@pytest.mark.parametrize("dtype", HALF)
def test_one_bit(dtype):
    """S-22: the neighbour of a value is another value."""
    problem, exact, rounded, counts = answered(case_of(Row(1, 1)), dtype)
    rounded.out.view(np.uint16)[0, 2, 5] ^= 1
    with pytest.raises(Mismatch, match=r"1 of 256 elements .* \(0, 2, 5\)"):
        check_single(problem, rounded, exact, counts)


def test_float32():
    """S-22: in float32 the operations behind the sums may cost some units of roundoff."""
    problem, exact, rounded, counts = answered(case_of(Row(1, 1)), "float32")
    near = Output(rounded.out * np.float32(1 + 2**-22), rounded.lse)
    assert check_single(problem, near, exact, counts)
    far = Output(rounded.out * np.float32(1 + 2**-19), rounded.lse)
    with pytest.raises(Mismatch, match="S-22"):
        check_single(problem, far, exact, counts)


def test_sums_of_equal_values_in_float32():
    """S-5, S-7: n equal terms, added one after the other, may be rounded n times one way."""
    [step] = build_steps(case_of(Row(4097, 1), Row(70, 1), equal_keys=True), DIMS, "float32")
    batch, before = materialize(step)
    problem, image = step.problem, append(step.problem, batch, before)
    exact, rounded = (attend(problem, batch, image, r) for r in (Rounding.EXACT, Rounding.SPEC))
    counts = equal_values(problem, batch, image, keys_seen(problem, batch))
    keys = keys_of_sums(problem, batch, counts)
    assert keys.tolist() == [4097**2, 70**2]
    lens = batch.seq_lens
    out = np.stack([added_up(exact.out[row] / n, n) for row, n in enumerate(lens)])
    answer = Output(out, exact.lse.astype(np.float32))
    assert check_output(problem, batch, answer, exact, rounded, keys=keys)
    assert check_single(problem, answer, exact, lens.astype(np.int64))


def test_keys_of_nan_are_not_equal():
    """S-22: the conversion of signaling NaN gives no warning."""
    case = case_of(Row(3, 3), Row(5, 5), equal_keys=True, odd_values=True)
    [step] = build_steps(case, DIMS, "float32")
    batch, before = materialize(step)
    image = append(step.problem, batch, before)
    counts = equal_values(step.problem, batch, image, keys_seen(step.problem, batch))
    assert counts.tolist() == [1, 0, 0, 1, 0, 0, 0, 0]


def added_up(value: np.ndarray, count: int) -> np.ndarray:
    """Return the sum of `count` equal values in float32, added one after the other."""
    total, term = np.zeros(value.shape, np.float32), value.astype(np.float32)
    for _ in range(count):
        total = total + term
    return total


@pytest.mark.parametrize(
    ("cache_format", "is_allowed"), [("fp8_e4m3", False), ("fp8_ds_mla", True)]
)
def test_rounded_scales(cache_format, is_allowed):
    """S-22: decoded values may be rounded before they are weighed where tokens have scales."""
    case = case_of(*(Row(1, 1) for _ in range(8)), cache_format=cache_format, cache_scale=0.3)
    problem, exact, rounded, counts = answered(case, "bfloat16")
    other = np.nextafter(
        rounded.out,
        np.where(widen(rounded.out) < exact.out, np.inf, -np.inf).astype(rounded.out.dtype),
    )
    middle = (widen(rounded.out) + widen(other)) / 2
    is_near = np.abs(exact.out - middle) < np.abs(exact.out) * 2.0**-11
    moved = Output(
        np.where(is_near & (widen(rounded.out) != exact.out), other, rounded.out), rounded.lse
    )
    assert (moved.out != rounded.out).any()
    if is_allowed:
        assert check_single(problem, moved, exact, counts)
    else:
        with pytest.raises(Mismatch, match="S-22"):
            check_single(problem, moved, exact, counts)


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2**16), ("float16", 2**13)])
def test_limits(dtype, most):
    """S-22: more equal keys than float32 sums exactly, and scores of thousands, are not held."""
    problem, exact, _, _ = answered(case_of(Row(1, 1)), dtype)
    assert np.isfinite(slack(problem, exact, np.array([most])))
    assert np.isinf(slack(problem, exact, np.array([most + 1])))
    assert np.isinf(slack(problem, exact, np.array([0])))
    exact.score_bound[:] = 1e6
    assert np.isinf(slack(problem, exact, np.array([1])))


@pytest.mark.parametrize("causal", [True, False])
def test_prefill(causal):
    """S-22: the first query of a prompt, and all of a non-causal row of one key, see one value."""
    case = PrefillCase(
        group="prefill",
        name="test",
        why="",
        rules=("S-22",),
        rows=(Row(3, 3), Row(5, 2), Row(1, 2)),
        causal=causal,
    )
    problem = case.problem(DIMS, "bfloat16")
    [batch] = build_prefills(case, DIMS, "bfloat16")
    counts = lone_keys(batch)
    assert counts.tolist() == ([1, 0, 0, 0, 0, 0, 1] if causal else [0, 0, 0, 0, 0, 1, 1])
    exact, rounded = (prefill(problem, batch, r) for r in (Rounding.EXACT, Rounding.SPEC))
    answer = rounded.output("bfloat16")
    assert check_single(problem, answer, exact, counts)
    answer.out.view(np.uint16)[6, 1, 2] ^= 1
    with pytest.raises(Mismatch, match=r"S-22.* \(6, 1, 2\)"):
        check_single(problem, answer, exact, counts)
