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
from paged_mla_conformance.bad_layers import (
    BAD_LAYERS,
    BAD_PARTIALS,
    BAD_QUERY_SCALES,
    GOOD_PARTIALS,
    BadLayer,
    BadPartials,
)
from paged_mla_conformance.bad_prefills import BASE as PREFILL
from paged_mla_conformance.bad_prefills import CAPACITIES
from paged_mla_conformance.bending import bent_case
from paged_mla_conformance.both_forms import Layer
from paged_mla_conformance.profile import Run
from paged_mla_conformance.trial import Stage, Trial
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


def _base(run: Run, base: str) -> Trial:
    case, note = bent_case(BASES[base], run.backend.capabilities)
    return Trial(run.backend, case, run.dims, run.dtypes[0], note)


@pytest.mark.parametrize("bad", BAD_PROBLEMS, ids=lambda bad: bad.name)
def test_bad_problem(mla_run: Run, bad: BadProblem) -> None:
    """A problem that cannot be served is refused when the runner is prepared."""
    trial = _base(mla_run, bad.base)
    problem = bad.spoil(trial.case.problem(trial.dims, trial.dtype))
    with pytest.raises((InvalidArgument, Unsupported), match=bad.argument):
        mla_run.backend.prepare(problem)


@pytest.mark.parametrize("bad", BAD_BATCHES, ids=lambda bad: bad.name)
def test_bad_batch(mla_run: Run, bad: BadBatch) -> None:
    """A batch no rule allows is refused; the cache keeps every byte and the runner its use."""
    trial = _base(mla_run, bad.base)
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
            f"{call} wrote to the cache before it refused"
        )
    runner.append(good.batch)
    if bad.base != "slots":  # explicit slots do not fill the rows that attention reads
        runner.load_cache(good.after)
        trial.attend(runner, good)


def _ask(runner: Runner, call: str, good: Stage, bad: BadBatch) -> None:
    """Call a runner with the good step, spoilt."""
    spoilt = bad.spoil(good.problem, good.batch)
    if call == "layer":
        layer = Layer.of(good, 0).asked(good.batch.num_rows, good.problem.max_query_tokens)
        runner.layer(replace(layer, step=bad.spoil(good.problem, layer.step)))
    elif call == "quantise_queries":
        runner.quantise_queries(spoilt, None)
    else:
        getattr(runner, call)(spoilt)


@pytest.mark.mla(group="errors", ops=("layer",), features=("validation", "mixed"), rules=("S-21",))
@pytest.mark.parametrize("bad", BAD_LAYERS, ids=lambda bad: bad.name)
def test_bad_layer(mla_run: Run, bad: BadLayer) -> None:
    """A layer no rule allows is refused; the cache keeps every byte."""
    trial = _base(mla_run, bad.base)
    [good] = trial.stages()
    asked = Layer.of(good, 0).asked(good.batch.num_rows, good.problem.max_query_tokens)
    blocks = np.arange(good.problem.num_blocks, dtype=np.int64)
    runner = trial.prepare()
    runner.load_cache(good.before)
    with pytest.raises(ValueError, match=bad.argument):
        runner.layer(bad.spoil(asked))
    assert np.array_equal(runner.read_cache(blocks), good.before.read(blocks)), (
        "layer wrote to the cache before it refused"
    )


@pytest.mark.mla(group="errors", ops=("layer",), features=("validation", "mixed"), rules=("S-21",))
def test_the_good_layers_are_good(mla_run: Run) -> None:
    """Every base of the bad layers passes as it is."""
    for base in ("causal", "non_causal", "qlen"):
        trial = _base(mla_run, base)
        [good] = trial.stages()
        runner = trial.prepare()
        runner.load_cache(good.before)
        problem = good.problem
        runner.layer(Layer.of(good, 0).asked(good.batch.num_rows, problem.max_query_tokens))


@pytest.mark.mla(group="errors", ops=("merge",), features=("validation",), rules=("S-8",))
@pytest.mark.parametrize("bad", BAD_PARTIALS, ids=lambda bad: bad.name)
def test_bad_partials(mla_run: Run, bad: BadPartials) -> None:
    """Partial answers that no merge takes are refused."""
    runner = _base(mla_run, "causal").prepare()
    with pytest.raises(ValueError, match=bad.argument):
        runner.merge(bad.spoil(GOOD_PARTIALS.build(mla_run.dims.kv_lora_rank)))


@pytest.mark.mla(
    group="errors", ops=("quantise_queries",), features=("validation", "mixed"), rules=("S-11",)
)
@pytest.mark.parametrize("scale", BAD_QUERY_SCALES)
def test_bad_query_scale(mla_run: Run, scale: float) -> None:
    """Queries are divided by no scale that is not a finite float32 above 0."""
    trial = _base(mla_run, "causal")
    [good] = trial.stages()
    with pytest.raises(ValueError, match="scale"):
        trial.prepare().quantise_queries(good.batch, scale)


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


@pytest.mark.mla(group="errors", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("capacity", CAPACITIES)
def test_too_large_prefill(mla_run: Run, capacity: str) -> None:
    """A prefill past a capacity is refused."""
    argument, most = CAPACITIES[capacity]
    case, _ = bent_case(PREFILL, mla_run.backend.capabilities)
    problem = case.problem(mla_run.dims, mla_run.dtypes[0])
    [good] = build_prefills(case, mla_run.dims, mla_run.dtypes[0])
    runner = mla_run.backend.prepare(replace(problem, **{capacity: most}))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=argument):
        runner.prefill(good)


@pytest.mark.mla(group="errors", ops=("prefill",), features=("validation",), rules=("S-21",))
@pytest.mark.parametrize("size", ["qk_nope_head_dim", "v_head_dim"])
def test_heads_of_no_size(mla_run: Run, size: str) -> None:
    """A problem whose heads have no key without position, or no value, is refused."""
    problem = _base(mla_run, "causal").problem
    with pytest.raises((InvalidArgument, Unsupported), match=size):
        mla_run.backend.prepare(replace(problem, dims=replace(problem.dims, **{size: 0})))


def _refuses_capacity(run: Run, argument: str, shrink: Callable[[Problem], Problem]) -> None:
    trial = _base(run, "causal")
    [good] = trial.stages()
    runner = run.backend.prepare(shrink(good.problem))
    runner.load_cache(good.before)
    for call in ("plan", "append", "attend"):
        with pytest.raises(ValueError, match=argument):
            getattr(runner, call)(good.batch)
