"""Traces find backends that are wrong between steps, and name the step and the token."""

from __future__ import annotations

import pytest

from paged_mla_conformance.meta.mutants.backends import MutantBackend, mutant
from paged_mla_conformance.suite.trials.traces import TraceCrash, TraceMismatch, TraceTrial
from paged_mla_reference.backend import create
from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.simulator.scenarios import CORE, core_scenario
from paged_mla_shared.backend import Backend
from paged_mla_shared.dims import SMALL
from paged_mla_shared.problem import Batch, Output


class Crashing(ForwardingRunner):
    """Raises ``ZeroDivisionError``."""

    def attend(self, batch: Batch) -> Output:
        raise ZeroDivisionError(batch.num_rows)


CAUGHT = [
    ("the-future-is-seen", "chunks", "S-5"),
    ("positions-start-anew-in-each-chunk", "chunks", "S-3"),
    ("a-chunk-of-one-token-is-decoded", "chunks", "S-5"),
    ("lengths-are-those-of-the-first-step", "preemption", "S-5"),
    ("padding-writes-slot-0", "chains", "S-10"),
    ("trees-are-taken-for-chains", "trees", "S-5"),
    ("the-second-cache-is-not-taken", "trees", "S-10"),
    ("every-rank-writes-everything", "ranks", "S-10"),
    ("partials-are-averaged", "ranks", "S-8"),
]


def trial(backend: Backend, name: str) -> TraceTrial:
    return TraceTrial(backend, core_scenario(name), SMALL, "float32")


@pytest.mark.parametrize("scenario", CORE, ids=lambda scenario: scenario.name)
def test_the_reference_gives_the_dense_outputs(scenario):
    """S-19: every step is within budget, and the tightest check of each kind is kept."""
    right = trial(create(), scenario.name)
    assert right.check() > 8
    assert {"out", "lse", "positions", "slot_mapping"} <= {check.what for check in right.checks}


@pytest.mark.parametrize(
    ("name", "scenario", "rule"), CAUGHT, ids=[f"{c[0]}-{c[1]}" for c in CAUGHT]
)
def test_a_wrong_backend_is_caught(name: str, scenario: str, rule: str):
    """S-19: an output that depends on the schedule is found, with the rule that it breaks."""
    with pytest.raises(TraceMismatch) as caught:
        trial(mutant(name), scenario).check()
    assert caught.value.rule == rule
    assert f"trace {scenario}, step " in str(caught.value)


def test_a_crash_names_its_step():
    """S-19: an exception is a failure of one step, which cannot be an expected failure."""
    with pytest.raises(TraceCrash, match="trace chunks, step 0, rank 0: ZeroDivisionError"):
        trial(MutantBackend(wrap=Crashing), "chunks").check()


def test_a_mismatch_names_step_and_token():
    """S-19: the message leads directly to the wrong row."""
    with pytest.raises(TraceMismatch, match=r"step \d+, rank 0, token \d+ \(prefill of .*index"):
        trial(mutant("the-future-is-seen"), "chunks").check()
