"""Variants of a step have the same outputs (S-17, S-19, S-20)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.suite.selection.items import skip_if
from paged_mla_conformance.suite.selection.params import Skip
from paged_mla_conformance.suite.trials.metamorphic import FORMS, Form, halves, permuted_requests
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.rules.cache import slots_to_write
from paged_mla_reference.rules.paging import NO_SLOT
from paged_mla_reference.tolerance import compare
from paged_mla_shared.inputs import Step, build_steps
from paged_mla_shared.problem import Output

pytestmark = pytest.mark.mla(group="invariance", ops=("append", "attend"))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__.replace("_", "-"))
def test_form(trial: Trial, form: Callable[[Step], Form], request: pytest.FixtureRequest) -> None:
    """S-19, S-20: each query token has the same output in every variant of the step."""
    [step] = build_steps(trial.case, trial.dims, trial.dtype)
    other = form(step)
    unmet = trial.backend.capabilities.unmet(other.step.problem, (), ())
    skip_if(request.node, Skip("; ".join(unmet)) if unmet else None)
    whole, again = trial.answer(Stage.of(step)), trial.answer(Stage.of(other.step))
    same = Output(again.out / again.out.dtype.type(other.out_factor), again.lse)
    trial.check_same("S-19", Stage.of(step), other.tokens, whole, same)


@pytest.mark.mla(
    group="invariance", ops=("append", "attend", "merge"), features=("padding", "replay")
)
def test_split(trial: Trial) -> None:
    """S-8, S-20: merging the results over two parts of the keys gives the result over all keys."""
    [stage] = trial.stages()
    whole = trial.answer(stage)
    problem, parts = halves(stage)
    runner = trial.backend.prepare(problem)
    runner.load_cache(stage.after)
    answers = [runner.attend(part) for part in parts]
    merged = runner.merge([Output(a.out.astype(np.float32), a.lse) for a in answers])
    every = np.arange(stage.batch.num_tokens)
    trial.check_same("S-8", stage, every, whole, merged)


def test_named_slots(trial: Trial) -> None:
    """S-1, S-10: attention finds keys through the table and does not use the slots of a step."""
    [stage] = trial.stages()
    named = np.roll(slots_to_write(stage.problem, stage.batch), 1)
    runner = trial.prepare()
    for slots in (named, np.full_like(named, NO_SLOT)):
        runner.load_cache(stage.after)
        trial.attend(runner, replace(stage, batch=replace(stage.batch, slot_mapping=slots)))


def test_order(trial: Trial) -> None:
    """S-17: earlier calls do not change the bits of a step."""
    [stage] = trial.stages()
    alone, later = trial.prepare(), trial.prepare()
    later.load_cache(stage.after)
    later.attend(stage.batch)
    answers = []
    for runner in (alone, later):
        runner.load_cache(stage.before)
        runner.append(stage.batch)
        answers.append(runner.attend(stage.batch))
    trial.checks += compare.check_bitwise("S-17", answers[1], answers[0], "after another step")


@pytest.mark.mla(group="invariance", ops=("plan", "append", "attend"), features=("replay",))
def test_planned(trial: Trial) -> None:
    """S-17: the plan of a step that never runs does not affect another step of the same shape."""
    [step] = build_steps(trial.case, trial.dims, trial.dtype)
    stage, planned = Stage.of(step), Stage.of(permuted_requests(step).step)
    runner = trial.prepare()
    runner.load_cache(stage.before)
    runner.plan(planned.batch)
    trial.attend(runner, trial.append(runner, stage))


def test_another_runner(trial: Trial) -> None:
    """S-5, S-12, S-17: runners that are prepared later do not affect an earlier runner."""
    trial.check_beside()
