"""Bad input raises an error that names the argument, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.bad_inputs import (
    BAD_BATCHES,
    BAD_PROBLEMS,
    BASES,
    BadBatch,
    BadProblem,
)
from paged_mla_conformance.bending import bent_case
from paged_mla_conformance.profile import Run
from paged_mla_conformance.trial import Trial
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.problem import Problem

pytestmark = pytest.mark.mla(
    group="errors",
    ops=("plan", "append", "attend"),
    features=("validation", "explicit_slots", "mixed"),
    rules=("S-1", "S-2", "S-14"),
)


def _base(run: Run, base: str) -> Trial:
    case, note = bent_case(BASES[base], run.backend.capabilities)
    return Trial(run.backend, case, run.dims, run.dtypes[0], note)


@pytest.mark.parametrize("bad", BAD_PROBLEMS, ids=lambda bad: bad.name)
def test_bad_problem(mla_run: Run, bad: BadProblem) -> None:
    """A problem that cannot be served is refused when the runner is prepared."""
    trial = _base(mla_run, bad.base)
    problem = bad.spoil(trial.case.problem(trial.dims, trial.dtype))
    with pytest.raises((InvalidArgument, Unsupported)) as raised:
        mla_run.backend.prepare(problem)
    assert bad.argument in str(raised.value), f"the message does not name {bad.argument}"


@pytest.mark.parametrize("bad", BAD_BATCHES, ids=lambda bad: bad.name)
def test_bad_batch(mla_run: Run, bad: BadBatch) -> None:
    """A batch no rule allows is refused; the cache keeps every byte and the runner its use."""
    trial = _base(mla_run, bad.base)
    [good] = trial.stages()
    spoilt = bad.spoil(good.problem, good.batch)
    blocks = np.arange(good.problem.num_blocks, dtype=np.int64)
    runner = trial.prepare()
    runner.load_cache(good.before)
    for call in bad.calls:
        with pytest.raises(ValueError, match=bad.argument):
            getattr(runner, call)(spoilt)
        assert np.array_equal(runner.read_cache(blocks), good.before.read(blocks)), (
            f"{call} wrote to the cache before it refused"
        )
    runner.append(good.batch)
    if bad.base != "slots":  # explicit slots do not fill the rows that attention reads
        runner.load_cache(good.after)
        trial.attend(runner, good)


def test_the_good_steps_are_good(mla_run: Run) -> None:
    """Every base the bad inputs spoil passes as it is, so each refusal has one cause."""
    for base in BASES:
        trial = _base(mla_run, base)
        [stage] = trial.stages()
        runner = trial.prepare()
        runner.load_cache(stage.before)
        runner.plan(stage.batch)
        runner.append(stage.batch)


def test_too_many_rows(mla_run: Run) -> None:
    """A batch past ``max_rows`` is refused."""
    _refuses_capacity(mla_run, "max_rows", lambda problem: replace(problem, max_rows=2))


def test_too_many_tokens(mla_run: Run) -> None:
    """A batch past ``max_query_tokens`` is refused."""
    _refuses_capacity(
        mla_run, "max_query_tokens", lambda problem: replace(problem, max_query_tokens=13)
    )


def _refuses_capacity(run: Run, argument: str, shrink: Callable[[Problem], Problem]) -> None:
    trial = _base(run, "causal")
    [good] = trial.stages()
    runner = run.backend.prepare(shrink(good.problem))
    runner.load_cache(good.before)
    for call in ("plan", "append", "attend"):
        with pytest.raises(ValueError, match=argument):
            getattr(runner, call)(good.batch)
