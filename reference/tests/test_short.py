"""S-22: over many rows of few keys the error is that of an algorithm whose largest weight is 1."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from paged_mla_reference.rules.attention import Answer, attend, attend_visible
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.masks import keys_seen, visibility
from paged_mla_reference.rules.materialize import materialize
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_reference.tolerance.compare import Mismatch, check_output
from paged_mla_reference.tolerance.short import FEWEST_QUERIES, check_short
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.cases.exact import SHORT
from paged_mla_shared.dims import MlaDims
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Output, Problem

DIMS = MlaDims(
    num_heads=8, kv_lora_rank=128, qk_rope_head_dim=16, qk_nope_head_dim=32, v_head_dim=32
)
ROWS = 40
HALF = ("bfloat16", "float16")
Weighing = Callable[[np.ndarray, str], tuple[np.ndarray, np.ndarray]]


def step_of(keys: int, dtype: str, **more: object) -> tuple[Problem, Batch, CacheImage]:
    """Return a step of rows of so many keys, and the cache behind its append."""
    rows = (Row(keys, 1),) * ROWS
    case = Case(group="exact", name="test", why="", rules=("S-22",), rows=rows, **more)
    [step] = build_steps(case, DIMS, dtype)
    batch, before = materialize(step)
    return step.problem, batch, append(step.problem, batch, before)


def answered(keys: int, dtype: str, weighing: Weighing) -> tuple[Problem, Batch, Output, Answer]:
    """Return the output of an algorithm with its own weights of scores [H, K]."""
    problem, batch, image = step_of(keys, dtype)

    def attend_query(problem, query, own, _rounding):
        scores = round_to(problem.softmax_scale * (query @ own.T), "float32")
        weights, total = weighing(widen(scores), dtype)
        out = weights @ own[:, : problem.dims.kv_lora_rank] / total
        return out, np.log(np.exp(scores).sum(axis=1)), 0.0, 0.0

    own = attend_visible(
        problem, batch, image, visibility(problem, batch), attend_query=attend_query
    )
    exact, rounded = (attend(problem, batch, image, r) for r in (Rounding.EXACT, Rounding.SPEC))
    return problem, batch, own.output(dtype), exact, rounded


def sums_of(weights: np.ndarray) -> np.ndarray:
    """Return the sums of weights [H, K], [H, 1]."""
    return weights.sum(axis=1, keepdims=True)


def rounded(weights: np.ndarray, dtype: str) -> np.ndarray:
    """Return weights as numbers of a type."""
    return widen(round_to(weights, dtype))


def below_the_highest(scores: np.ndarray) -> np.ndarray:
    """Return weights of which the largest is 1."""
    return np.exp(scores - scores.max(axis=1, keepdims=True))


def below_an_integer(scores: np.ndarray) -> np.ndarray:
    """Return weights relative to the next power of two above the largest."""
    powers = scores / np.log(2)
    return np.exp2(powers - np.ceil(powers.max(axis=1, keepdims=True)))


def right(scores, dtype):
    """Round the weights alone."""
    weights = below_the_highest(scores)
    return rounded(weights, dtype), sums_of(weights)


def rounded_alike(scores, dtype):
    """Round the weights, and sum them rounded."""
    weights = rounded(below_the_highest(scores), dtype)
    return weights, sums_of(weights)


def raised(scores, dtype):
    """Round weights of which the largest is between a half and 1."""
    weights = below_an_integer(scores)
    return rounded(weights, dtype), sums_of(weights)


def divided_first(scores, dtype):
    """Round weights that are divided by their sum already."""
    weights = below_the_highest(scores)
    return rounded(weights / sums_of(weights), dtype), np.ones((len(scores), 1))


def cut_off(scores, dtype):
    """Round weights downwards."""
    weights = below_the_highest(scores)
    nearest = rounded(weights, dtype)
    down = np.nextafter(round_to(weights, dtype), np.zeros((), round_to(weights, dtype).dtype))
    return np.where(nearest > weights, widen(down), nearest), sums_of(weights)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keys", [2, 5, 64])
@pytest.mark.parametrize("weighing", [right, rounded_alike])
def test_right(keys, dtype, weighing):
    """S-22: the denominator may sum the weights as they were, or as they were rounded."""
    problem, batch, own, exact, spec = answered(keys, dtype, weighing)
    [check] = check_short(problem, keys_seen(problem, batch), own, exact, spec)
    assert check.what == f"root mean square at {keys} keys"
    assert check.error <= check.budget < 1.2 * check.error


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("keys", [3, 5, 64])
@pytest.mark.parametrize("weighing", [raised, divided_first, cut_off])
def test_wrong(keys, dtype, weighing):
    """S-22: weights that are rounded worse fail by their mean square, and by no largest error."""
    problem, batch, own, exact, spec = answered(keys, dtype, weighing)
    assert check_output(problem, batch, own, exact, spec)
    with pytest.raises(Mismatch, match=rf"S-22.*{ROWS * 8} queries that see {keys} keys"):
        check_short(problem, keys_seen(problem, batch), own, exact, spec)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_specification(case, dtype):
    """S-22: each case of short rows has enough queries of each of seven lengths."""
    [step] = build_steps(case, DIMS, dtype)
    batch, before = materialize(step)
    image = append(step.problem, batch, before)
    assert len(check_short(*_right_answer(step.problem, batch, image))) == 7


@pytest.mark.parametrize("case", SHORT, ids=lambda case: case.name)
def test_fewer_heads(case):
    """S-22: a backend without a head count runs no case that holds too few queries of a length."""
    heads = case.num_heads if "num_heads" in case.fixed else 4
    lengths = [row.seq_len for row in case.rows]
    assert min(lengths.count(n) for n in set(lengths)) * heads >= FEWEST_QUERIES


@pytest.mark.parametrize(
    ("dtype", "cache_format", "is_held"),
    [
        ("bfloat16", None, True),
        ("bfloat16", "fp8_e4m3", True),
        ("bfloat16", "fp8_ds_mla", False),  # decoded values may be rounded too
        ("float32", None, False),  # the order of sums is all there is
    ],
)
def test_formats(dtype, cache_format, is_held):
    """S-22: rows over plain 16-bit caches and over codes of one scale are held."""
    problem, batch, image = step_of(4, dtype, cache_format=cache_format)
    exact, spec = (attend(problem, batch, image, r) for r in (Rounding.EXACT, Rounding.SPEC))
    assert (
        bool(check_short(problem, keys_seen(problem, batch), spec.output(dtype), exact, spec))
        == is_held
    )


@pytest.mark.parametrize("keys", [1, 65])
def test_lengths(keys):
    """S-22: one key has a rule of its own, and among many the largest weight counts for little."""
    assert not check_short(*_right_answer(*step_of(keys, "float16")))


def test_few_queries():
    """S-22: too few queries give no useful average."""
    problem, seen, own, exact, spec = _right_answer(*step_of(4, "float16"))
    for answer in (exact, spec):
        answer.out[FEWEST_QUERIES // 8 - 1 :] = np.nan
    assert not check_short(problem, seen, own, exact, spec)


def _right_answer(problem: Problem, batch: Batch, image: CacheImage):
    exact, spec = (attend(problem, batch, image, r) for r in (Rounding.EXACT, Rounding.SPEC))
    return problem, keys_seen(problem, batch), spec.output(problem.dtype), exact, spec
