"""A recording runner keeps dumps in which a right step breaks no rule."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.runners.recording_runner import RecordingBackend, RecordingRunner
from paged_mla_reference.backend import create
from paged_mla_reference.explain.explanation import explain
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.materialize import materialize
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Output

CASE = Case(group="x", name="x", why="x", rules=("S-5",), rows=(Row(70, 3), Row(9, 9)))


@pytest.fixture
def step():
    """Return a step with its batch, and its cache before and after the append."""
    [given] = build_steps(CASE, SMALL, "float32")
    batch, before = materialize(given)
    return given.problem, batch, before, append(given.problem, batch, before)


def recording(problem) -> RecordingRunner:
    runner = RecordingBackend(create()).prepare(problem)
    assert isinstance(runner, RecordingRunner)
    return runner


def test_a_gather_before_an_attend_is_no_append(step):
    """S-10: nothing was appended, so the dump does not claim that the tokens were written."""
    problem, batch, _, after = step
    runner = recording(problem)
    runner.load_cache(after)
    runner.gather_context(batch)
    runner.attend(batch)
    assert "cache_before" in runner.arrays
    assert not explain(runner.dump).is_broken


def test_a_merge_ends_the_step(step):
    """S-8: a later call for the batch of an earlier step records its inputs again."""
    problem, batch, before, _ = step
    runner = recording(problem)
    runner.load_cache(before)
    runner.append(batch)
    answer = runner.attend(batch)
    runner.merge([Output(answer.out, answer.lse)] * 2)
    runner.attend(batch)
    assert "partial_out" not in runner.arrays
    assert "q_nope" in runner.arrays
    assert not explain(runner.dump).is_broken


def test_a_layer_may_be_called_twice_for_one_step(step):
    """S-21: the second call records the same inputs."""
    problem, batch, before, _ = step
    rng, dims = np.random.default_rng(0), problem.dims
    shape = (batch.num_tokens, dims.num_heads, dims.qk_nope_head_dim)
    rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
    weights = rng.standard_normal((rows, dims.kv_lora_rank), np.float32)
    given = LayerBatch(
        replace(batch, q_nope=rng.standard_normal(shape, np.float32)), weights, 0, 99
    )
    runner = recording(problem)
    runner.load_cache(before)
    runner.layer(given)
    runner.layer(given)
    assert runner.arrays["layer_q_nope"].shape == shape
    assert not explain(runner.dump).is_broken
