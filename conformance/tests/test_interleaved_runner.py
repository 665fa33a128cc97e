"""Runners whose calls are interleaved: the other runner plans other, legal steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_conformance.meta.mutants.backends import MutantBackend, mutant
from paged_mla_conformance.runners.decoy import decoy_problem, decoy_step
from paged_mla_conformance.runners.interleaved_runner import InterleavedRunner
from paged_mla_conformance.suite.trials.layered import check_layer, check_layer_bits
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.backend import CAPABILITIES, ReferenceBackend
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_reference.tolerance.compare import Mismatch
from paged_mla_shared.backend import Runner
from paged_mla_shared.cases import CASES, Case
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

ASKED = [case for group in ("gather", "queries", "layer") for case in CASES[group]]


def _case(group: str, name: str) -> Case:
    [case] = [case for case in CASES[group] if case.name == name]
    return case


@pytest.mark.parametrize(
    "case", [c for c in ASKED if not c.is_large and not c.cache_elements], ids=lambda case: case.id
)
def test_the_other_step_is_legal(case: Case):
    """S-1, S-14, S-17: the other step has the same shape and other blocks."""
    for step in build_steps(case, SMALL, "float32"):
        stage = Stage.of(step)
        other = decoy_step(stage.problem, stage.batch)
        validate_batch(decoy_problem(stage.problem, CAPABILITIES), other)
        assert other.q_nope.shape == stage.batch.q_nope.shape
        assert other.block_table.shape == stage.batch.block_table.shape
        same = np.array_equal(other.block_table, stage.batch.block_table)
        assert same == (not stage.batch.seq_lens.any())


def test_the_other_problem_has_other_scales_and_ropes():
    """S-5, S-11, S-12: a runner that uses values of the other runner is wrong."""
    problem = _case("formats", "scale-7").problem(SMALL, "float32")
    other = decoy_problem(problem, CAPABILITIES)
    assert (other.softmax_scale, other.cache_scale) == (2 * problem.softmax_scale, 14.0)
    assert other.rope is not None
    assert decoy_problem(problem, replace(CAPABILITIES, ropes=frozenset())).rope is None


def test_plans_come_between_calls():
    """S-17: the runner plans its first step once; the other runner plans before every call."""
    planned: list[tuple[float, int]] = []

    class Noting(ForwardingRunner):
        def plan(self, batch: Batch) -> Metadata:
            planned.append((self.problem.softmax_scale, batch.num_tokens))
            return self.inner.plan(batch)

    trial = Trial(MutantBackend(wrap=Noting), _case("gather", "again"), SMALL, "float32")
    own = trial.problem.softmax_scale
    trial.check_read("gather_context")
    others = [(2 * own, stage.batch.num_tokens) for stage in trial.stages()]
    assert planned == [(own, others[0][1]), *others]


def test_no_other_runner_without_plans_or_with_a_huge_cache():
    """S-17: the other runner needs the operation plan and memory for a second cache."""
    without = replace(CAPABILITIES, ops=CAPABILITIES.ops - {"plan"})
    small, huge = (_case("gather", name) for name in ("bs16", "2g-elements"))
    for capabilities, case in ((without, small), (CAPABILITIES, huge)):
        trial = Trial(ReferenceBackend(capabilities=capabilities), case, SMALL, "float32")
        assert not isinstance(trial.prepare_first(), InterleavedRunner)
        trial.check_read("gather_context")


@pytest.mark.parametrize("name", ["again", "padded-again", "trees-again"])
def test_bits_of_later_layers_are_compared(name: str):
    """S-17: a rounding that only later steps of a runner have is found."""
    trial = Trial(
        mutant("layer-splits-follow-the-first-step"), _case("layer", name), SMALL, "float32"
    )
    with pytest.raises(Mismatch, match="compared with a new runner"):
        check_layer(trial)


@pytest.mark.parametrize("name", ["again", "padded-again"])
def test_bits_of_later_prefills_are_compared(name: str):
    """S-17: a rounding that only later prefills of a runner have is found."""
    case = _case("prefill", name)
    Trial(mutant("right"), case, SMALL, "float32").check_prefill()
    wrong = mutant("prefill-tiles-follow-the-first-step")
    with pytest.raises(Mismatch, match="compared with a new runner"):
        Trial(wrong, case, SMALL, "float32").check_prefill()


@pytest.mark.parametrize("name", ["mixed", "drafts", "non-causal"])
def test_bits_of_layers_of_other_rows_are_compared(name: str):
    """S-20: a rounding that only single rows have is found."""
    case = _case("batch_invariant", name)
    check_layer_bits(Trial(mutant("right"), case, SMALL, "float32"))
    with pytest.raises(Mismatch, match=r"\[S-20\].*row 0 alone, absorbed"):
        check_layer_bits(Trial(mutant("layer-tiles-follow-the-batch"), case, SMALL, "float32"))


def test_layers_in_both_forms_keep_their_bits():
    """S-20: a rounding that only materialized rows have is found."""

    class Materialized(ForwardingRunner):
        def __init__(self, problem: Problem, inner: Runner) -> None:
            super().__init__(problem, inner)
            self.wrong = mutant("layer-tiles-follow-the-batch").wrap(problem, inner)

        def layer(self, batch: LayerBatch) -> Output:
            return (self.inner if batch.absorbed_rows else self.wrong).layer(batch)

    trial = Trial(
        MutantBackend(wrap=Materialized), _case("batch_invariant", "mixed"), SMALL, "float32"
    )
    with pytest.raises(Mismatch, match="row 0 alone, materialized"):
        check_layer_bits(trial)
