"""Budgets refuse small errors and accept every legal rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from turned import turned

from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.backend import create
from paged_mla_reference.rules import chunked
from paged_mla_reference.rules.attention import Answer, attend
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding, ulp
from paged_mla_reference.tolerance import budgets
from paged_mla_reference.tolerance.compare import Mismatch, check_output, check_same
from paged_mla_shared.cases import GROUPS, PREFILLS, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Output, Problem

DTYPES = ("float32", "float16", "bfloat16")
ROTATED = [
    case
    for case in GROUPS["rope"]
    if not case.then and max(row.seq_len for row in case.rows) < 100_000
]


def answers(dtype: str) -> tuple[Problem, Answer, Answer]:
    [case] = [c for c in GROUPS["decode"] if c.name == "h16"]
    stage = Stage.of(build_steps(case, SMALL, dtype)[0])
    exact, rounded = (
        attend(stage.problem, stage.batch, stage.after, r) for r in (Rounding.EXACT, Rounding.SPEC)
    )
    return stage.problem, stage.batch, exact, rounded


@pytest.mark.parametrize(
    ("magnitude", "dtype", "spacing"),
    [(1.0, "bfloat16", 2**-7), (1.0, "float16", 2**-10), (3.0, "float32", 2**-22)],
)
def test_ulp(magnitude: float, dtype: str, spacing: float):
    """An ulp is the distance to the next value."""
    assert ulp(np.array([magnitude]), dtype)[0] == spacing


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rounded_oracle_is_within_budget(dtype: str):
    """S-5: the roundings of the rules are always within budget."""
    problem, batch, exact, rounded = answers(dtype)
    checks = check_output(problem, batch, rounded.output(dtype), exact, rounded)
    assert all(check.error <= check.budget for check in checks)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("case", ROTATED, ids=lambda case: case.name)
def test_a_rotated_element_may_be_rounded_to_its_other_neighbor(case: Case, dtype: str):
    """S-12: an element near the middle of two numbers may be rounded to either."""
    stage = Stage.of(build_steps(case, SMALL, dtype)[0])
    problem, batch = stage.problem, stage.batch
    assert problem.rope is not None
    exact, rounded = stage.answers()
    positions = metadata(problem, batch).positions
    nearest, other = turned(batch.q_pe, positions, problem.rope, dtype)
    unturned = replace(problem, rope=None)
    for element in range(SMALL.qk_rope_head_dim):
        q_pe = nearest.copy()
        q_pe[..., element] = other[..., element]
        found = attend(unturned, replace(batch, q_pe=q_pe), stage.after)
        check_output(problem, batch, found.output(dtype), exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_error_of_one_percent_is_outside(dtype: str):
    """S-5: a wrong weight is outside the budget in every dtype."""
    problem, batch, exact, rounded = answers(dtype)
    off = rounded.output(dtype)
    largest = np.unravel_index(np.argmax(np.abs(exact.out)), exact.out.shape)
    out = off.out.copy()
    out[largest] = out[largest].astype(np.float32) * np.float32(1.03)
    with pytest.raises(Mismatch, match="S-5"):
        check_output(problem, batch, Output(out, off.lse), exact, rounded)


@pytest.mark.parametrize(
    ("factor", "hint"),
    [
        (1 / np.log(2), "in base 2, "),
        (1 / np.log(10), "in base 10, "),
        (1.5, "every query; every lse is 1.5 times the exact lse$"),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_with_another_base_is_named(dtype: str, factor: float, hint: str):
    """S-7: the message names the base, or the factor if it is no known base."""
    problem, batch, exact, rounded = answers(dtype)
    off = rounded.output(dtype)
    lse = (off.lse * np.float64(factor)).astype(np.float32)
    with pytest.raises(Mismatch, match=rf"\[S-7\].*{hint}"):
        check_output(problem, batch, Output(off.out, lse), exact, rounded)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_lse_stored_in_bfloat16_is_outside(dtype: str):
    """S-7: the values of an lse need the precision of float32."""
    problem, batch, exact, rounded = answers(dtype)
    off = rounded.output(dtype)
    coarse = (off.lse.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    with pytest.raises(Mismatch, match="S-7"):
        check_output(problem, batch, Output(off.out, coarse), exact, rounded)


def parts(dtype: str) -> tuple[PrefillBatch, list[budgets.Part], Trial]:
    """Return the parts of a prefill in chunks, with the outputs of the reference."""
    [case] = [c for c in PREFILLS if c.name == "chunks-of-100"]
    trial = Trial(create(), case, SMALL, dtype)
    runner = trial.prepare()
    [batch] = build_prefills(case, SMALL, dtype)
    return batch, [trial.prefill(runner, part) for part in chunked.parts_of(batch, 100)], trial


def in_base_2(found: list[budgets.Part]) -> list[Output]:
    """Return the outputs; those of contexts have an lse in base 2."""
    contexts = [Output(p.answer.out, p.answer.lse / np.float32(np.log(2))) for p in found[:-1]]
    return [*contexts, found[-1].answer]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_merge_in_another_base_is_outside(dtype: str):
    """S-21: contexts with the weights 2^lse are outside the budget of a merge."""
    batch, found, trial = parts(dtype)
    exact = prefill(trial.problem, batch, Rounding.EXACT)
    out, _ = budgets.chunk_budget(found)
    right = chunked.merge_parts([part.answer for part in found])
    assert (np.abs(right.out - exact.out).max(axis=(1, 2)) <= out).all()
    wrong = chunked.merge_parts(in_base_2(found))
    assert (np.abs(wrong.out - exact.out).max(axis=(1, 2)) > out).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_budget_of_a_merge_of_parts(dtype: str):
    """S-21: a merge of rounded outputs is within budget; a lost part or base 2 is outside."""
    batch, found, trial = parts(dtype)
    whole = trial.prefill(trial.prepare(), batch)
    out, lse = budgets.parts_budget(dtype, whole.exact, (whole.out, whole.lse), len(found))
    seen = np.isfinite(whole.exact.lse)
    answers = [part.answer for part in found]
    for merged, is_inside in ((answers, True), (answers[1:], False), (in_base_2(found), False)):
        answer = chunked.merge_parts(merged)
        off = np.abs(answer.out - whole.exact.out).max(axis=(1, 2))
        lse_off = np.abs(answer.lse[seen] - whole.exact.lse[seen])
        assert (off <= out).all() == is_inside
        assert (lse_off <= lse[seen]).all() == is_inside


@pytest.mark.parametrize("what", ["out", "lse"])
def test_nan_is_not_within_a_budget(what):
    """S-8, S-19: NaN never satisfies a tolerance, also in another form of a step."""
    right = Output(np.ones((2, 1, 4), np.float32), np.zeros((2, 1), np.float32))
    allowed = np.ones(2), np.ones((2, 1))
    check_same("S-19", right, right, allowed)
    wrong = replace(right, **{what: np.full_like(getattr(right, what), np.nan)})
    with pytest.raises(Mismatch, match=what):
        check_same("S-19", wrong, right, allowed)
