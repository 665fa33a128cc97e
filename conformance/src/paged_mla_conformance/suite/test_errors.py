"""Illegal input raises an error that names the argument, before any write to the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.suite.bad_inputs.layers import (
    BAD_LAYERS,
    BAD_PARTIALS,
    BAD_QUERY_SCALES,
    GOOD_PARTIALS,
    BadLayer,
    BadPartials,
)
from paged_mla_conformance.suite.bad_inputs.prefills import BASE as PREFILL
from paged_mla_conformance.suite.bad_inputs.prefills import CAPACITIES
from paged_mla_conformance.suite.bad_inputs.steps import (
    BAD_BATCHES,
    BAD_PROBLEMS,
    BASES,
    BadBatch,
    BadProblem,
)
from paged_mla_conformance.suite.selection.adapt_case import adapt_case
from paged_mla_conformance.suite.selection.core import Run
from paged_mla_conformance.suite.selection.items import skip_if
from paged_mla_conformance.suite.selection.params import why_undeclared
from paged_mla_conformance.suite.trials.both_forms import Layer
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_shared.backend import Runner
from paged_mla_shared.errors import InvalidArgument, Unsupported
from paged_mla_shared.prefill_inputs import build_prefills
from paged_mla_shared.problem import Problem

pytestmark = pytest.mark.mla(
    group="errors",
    ops=("plan", "append", "attend"),
    features=("validation", "explicit_slots", "mixed"),
    rules=("S-1", "S-2", "S-14"),
)


Bases = Callable[..., Trial]


@pytest.fixture
def base(request: pytest.FixtureRequest, mla_run: Run) -> Bases:
    """Return a function that makes the trial of a legal step by its name.

    The function skips the test if the backend does not declare a capability of the step.
    """

    def trial_of(name: str, *ops: str) -> Trial:
        trial = _trial(mla_run, name)
        skip_if(request.node, why_undeclared(mla_run, trial.case, trial.dtype, ops))
        return trial

    return trial_of


def _trial(run: Run, base: str) -> Trial:
    case, note = adapt_case(BASES[base], run.backend.capabilities)
    return Trial(run.backend, case, run.dims, run.dtypes[0], note)


def _declared(run: Run, bases: Iterable[str], *ops: str) -> list[Trial]:
    """Return the trials of the legal steps that the backend supports."""
    trials = [_trial(run, base) for base in bases]
    return [trial for trial in trials if not why_undeclared(run, trial.case, trial.dtype, ops)]


@pytest.mark.parametrize("bad", BAD_PROBLEMS, ids=lambda bad: bad.name)
def test_bad_problem(mla_run: Run, base: Bases, bad: BadProblem) -> None:
    """An illegal problem is refused when the runner is prepared."""
    trial = base(bad.base)
    problem = bad.spoil(trial.case.problem(trial.dims, trial.dtype))
    with pytest.raises((InvalidArgument, Unsupported), match=bad.argument):
        mla_run.backend.prepare(problem)


@pytest.mark.parametrize("bad", BAD_BATCHES, ids=lambda bad: bad.name)
def test_bad_batch(base: Bases, bad: BadBatch) -> None:
    """An illegal batch is refused, no byte of the cache changes, and the runner stays usable."""
    trial = base(bad.base)
    [good] = trial.stages()
    blocks = np.arange(good.problem.num_blocks, dtype=np.int64)
    runner = trial.prepare()
    runner.load_cache(good.before)
    for call in bad.calls:
        if trial.backend.capabilities.unmet(good.problem, (call,), ()):
            continue
        with pytest.raises(ValueError, match=bad.argument):
            _ask(runner, call, good, bad)
        assert np.array_equal(runner.read_cache(blocks), good.before.read(blocks)), (
            f"{call} wrote to the cache before it raised an error"
        )
    runner.append(good.batch)
    if bad.base != "slots":  # explicit slots do not fill the rows that attention reads
        runner.load_cache(good.after)
        trial.attend(runner, good)


def _ask(runner: Runner, call: str, good: Stage, bad: BadBatch) -> None:
    """Call a runner with the illegal form of a legal step."""
    spoilt = bad.spoil(good.problem, good.batch)
    if call == "layer":
        layer = Layer.of(good, 0).asked(good.batch.num_rows, good.problem.max_query_tokens)
        runner.layer(replace(layer, step=bad.spoil(good.problem, layer.step)))
    elif call == "quantize_queries":
        runner.quantize_queries(spoilt, None)
    else:
        getattr(runner, call)(spoilt)


@pytest.mark.mla(group="errors", ops=("layer",), features=("validation", "mixed"), rules=("S-21",))
@pytest.mark.parametrize("bad", BAD_LAYERS, ids=lambda bad: bad.name)
def test_bad_layer(base: Bases, bad: BadLayer) -> None:
    """An illegal layer is refused, and no byte of the cache changes."""
    trial = base(bad.base, "layer")
    [good] = trial.stages()
    asked = Layer.of(good, 0).asked(good.batch.num_rows, good.problem.max_query_tokens)
    blocks = np.arange(good.problem.num_blocks, dtype=np.int64)
    runner = trial.prepare()
    runner.load_cache(good.before)
    with pytest.raises(ValueError, match=bad.argument):
        runner.layer(bad.spoil(asked))
    assert np.array_equal(runner.read_cache(blocks), good.before.read(blocks)), (
        "layer wrote to the cache before it raised an error"
    )


@pytest.mark.mla(group="errors", ops=("layer",), features=("validation", "mixed"), rules=("S-21",))
def test_the_good_layers_are_good(mla_run: Run, base: Bases) -> None:
    """Every legal layer from which illegal ones are made is accepted, if it is declared."""
    base("causal", "layer")
    for trial in _declared(mla_run, ("causal", "non_causal", "qlen"), "layer"):
        [good] = trial.stages()
        runner = trial.prepare()
        runner.load_cache(good.before)
        problem = good.problem
        runner.layer(Layer.of(good, 0).asked(good.batch.num_rows, problem.max_query_tokens))


@pytest.mark.mla(group="errors", ops=("merge",), features=("validation",), rules=("S-8",))
@pytest.mark.parametrize("bad", BAD_PARTIALS, ids=lambda bad: bad.name)
def test_bad_partials(mla_run: Run, base: Bases, bad: BadPartials) -> None:
    """A merge refuses illegal partial results."""
    runner = base("causal").prepare()
    with pytest.raises(ValueError, match=bad.argument):
        runner.merge(bad.spoil(GOOD_PARTIALS.build(mla_run.dims.kv_lora_rank)))


@pytest.mark.mla(
    group="errors", ops=("quantize_queries",), features=("validation", "mixed"), rules=("S-11",)
)
@pytest.mark.parametrize("scale", BAD_QUERY_SCALES)
def test_bad_query_scale(base: Bases, scale: float) -> None:
    """A scale of queries that is not a finite float32 above 0 is refused."""
    trial = base("causal")
    [good] = trial.stages()
    with pytest.raises(ValueError, match="scale"):
        trial.prepare().quantize_queries(good.batch, scale)


def test_the_good_steps_are_good(mla_run: Run, base: Bases) -> None:
    """Every legal step from which illegal ones are made is accepted, so a refusal has one cause."""
    base("causal")
    for trial in _declared(mla_run, BASES):
        [stage] = trial.stages()
        runner = trial.prepare()
        runner.load_cache(stage.before)
        runner.plan(stage.batch)
        runner.append(stage.batch)


def test_too_many_rows(mla_run: Run, base: Bases) -> None:
    """A batch with more than ``max_rows`` rows is refused."""
    _refuses_capacity(mla_run, base, "max_rows", lambda problem: replace(problem, max_rows=2))


def test_too_many_tokens(mla_run: Run, base: Bases) -> None:
    """A batch with more than ``max_query_tokens`` tokens is refused."""
    _refuses_capacity(
        mla_run, base, "max_query_tokens", lambda problem: replace(problem, max_query_tokens=13)
    )


@pytest.mark.mla(group="errors", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_too_large_prefill(mla_run: Run, capacity: str, request: pytest.FixtureRequest) -> None:
    """A prefill that exceeds a capacity is refused."""
    argument, most = CAPACITIES[capacity]
    case, _ = adapt_case(PREFILL, mla_run.backend.capabilities)
    skip_if(request.node, why_undeclared(mla_run, case, mla_run.dtypes[0], ("prefill",)))
    problem = case.problem(mla_run.dims, mla_run.dtypes[0])
    [good] = build_prefills(case, mla_run.dims, mla_run.dtypes[0])
    runner = mla_run.backend.prepare(replace(problem, **{capacity: most}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=argument):
        runner.prefill(good)


@pytest.mark.mla(group="errors", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("size", ["qk_nope_head_dim", "v_head_dim"])
def test_heads_of_no_size(mla_run: Run, base: Bases, size: str) -> None:
    """A problem with ``qk_nope_head_dim`` 0 or ``v_head_dim`` 0 is refused."""
    problem = base("causal").problem
    with pytest.raises((InvalidArgument, Unsupported), match=size):
        mla_run.backend.prepare(replace(problem, dims=replace(problem.dims, **{size: 0})))


def _refuses_capacity(
    run: Run, base: Bases, argument: str, shrink: Callable[[Problem], Problem]
) -> None:
    trial = base("causal")
    [good] = trial.stages()
    runner = run.backend.prepare(shrink(good.problem))
    runner.load_cache(good.before)
    for call in ("plan", "append", "attend"):
        with pytest.raises(ValueError, match=argument):
            getattr(runner, call)(good.batch)
