"""Attention over keys and values of every head, in one piece and in chunks (S-21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paged_mla_conformance.bad_prefills import BAD_PREFILLS, BASE, CAPACITIES, BadPrefill
from paged_mla_conformance.bending import bent_case
from paged_mla_conformance.forms import arrangements, of_prefill_rows
from paged_mla_conformance.profile import Run
from paged_mla_conformance.trial import Trial
from paged_mla_reference.judging import compare
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Output

pytestmark = pytest.mark.mla(group="prefill", ops=("prefill",))


def test_prefill(trial: Trial) -> None:
    """S-21; where the backend says that it is deterministic, rows keep their bits (S-20)."""
    answers = trial.check_prefill()
    if "deterministic" not in trial.backend.capabilities.features:
        return
    for batch, whole in answers:
        for name, rows in arrangements(batch).items():
            some, tokens = of_prefill_rows(batch, rows)
            expected = Output(whole.out[tokens], whole.lse[tokens])
            actual = trial.prepare().prefill(some)
            trial.checks += compare.check_bitwise("S-20", actual, expected, name)


def _base(run: Run) -> tuple[Trial, PrefillBatch]:
    """Return a trial of the base that bad prefills spoil, and its good batch."""
    case, note = bent_case(BASE, run.backend.capabilities)
    trial = Trial(run.backend, case, run.dims, run.dtypes[0], note)
    [good] = build_prefills(case, trial.dims, trial.dtype)
    return trial, good


@pytest.mark.mla(
    group="prefill",
    ops=("prefill",),
    features=("validation", "mixed", "padding"),
    rules=("S-4", "S-21"),
)
@pytest.mark.parametrize("bad", BAD_PREFILLS, ids=lambda bad: bad.name)
def test_bad_prefill(mla_run: Run, bad: BadPrefill) -> None:
    """A prefill no rule allows is refused, and the runner keeps its use."""
    trial, good = _base(mla_run)
    runner = trial.prepare()
    with pytest.raises(ValueError, match=bad.argument):
        runner.prefill(bad.spoil(good))
    trial.prefill(runner, good)


@pytest.mark.mla(group="prefill", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_too_large_prefill(mla_run: Run, capacity: str) -> None:
    """A prefill past a capacity is refused."""
    argument, most = CAPACITIES[capacity]
    trial, good = _base(mla_run)
    runner = trial.backend.prepare(replace(trial.problem, **{capacity: most}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=argument):
        runner.prefill(good)


@pytest.mark.mla(group="prefill", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("size", ["qk_nope_head_dim", "v_head_dim"])
def test_heads_of_no_size(mla_run: Run, size: str) -> None:
    """A problem whose heads have no key without position, or no value, is refused."""
    trial, _ = _base(mla_run)
    problem = trial.problem
    with pytest.raises((InvalidArgument, Unsupported), match=size):
        mla_run.backend.prepare(replace(problem, dims=replace(problem.dims, **{size: 0})))
