"""The search for failing schedules: it finds, shrinks, prints and replays."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_mla_conformance.fuzz.__main__ import main
from paged_mla_conformance.fuzz.machine import REPLAY_FILE
from paged_mla_conformance.fuzz.sweep import Sweep
from paged_mla_conformance.mutants.backends import mutant
from paged_mla_reference.backend import create
from paged_mla_reference.simulator.scenario import load_scenario
from paged_mla_shared.dims import SMALL

REFERENCE = "paged_mla_reference.backend:create"


def test_generated_schedules_through_the_reference():
    """S-19: numbered schedules in every dtype; most situations within a few of them."""
    sweep = Sweep()
    for seed in range(12):
        sweep.run(create(), SMALL, ("float32", "float16", "bfloat16"), seed)
    assert sweep.failures == {}
    assert sweep.schedules == 12
    assert sweep.steps > 300
    assert len(sweep.coverage.missing) < 10


def test_a_wrong_backend_fails_by_number():
    """S-19: the seed is the schedule's name."""
    sweep, wrong = Sweep(), mutant("lengths-are-those-of-the-first-step")
    for seed in range(4):
        sweep.run(wrong, SMALL, ("float32",), seed)
    assert sweep.failures
    assert all(f"trace generated-{seed}, step " in m for seed, m in sweep.failures.items())


def test_the_command_sweeps_and_searches(capsys: pytest.CaptureFixture[str]):
    """S-19: the reference survives both, and the coverage table is printed."""
    assert main(["--backend", REFERENCE, "--schedules", "2", "--examples", "5"]) == 0
    printed = capsys.readouterr().out
    assert "eviction of a formerly shared block" in printed
    assert "2 schedules" in printed
    assert "hypothesis: no failing schedule" in printed


def test_a_failure_is_shrunk_printed_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-19: the smallest schedule that fails comes as a table and as a file that fails again."""
    wrong = "paged_mla_conformance.mutants.backends:context-is-added-twice"
    search = ["--backend", wrong, "--schedules", "0", "--examples", "40"]
    assert main([*search, "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "trace fuzz, step" in printed
    assert "r0: prefill 0+1" in printed
    replay = tmp_path / REPLAY_FILE
    assert str(replay) in printed
    assert len(load_scenario(replay).requests) == 1
    assert main(["--backend", wrong, "--replay", str(replay)]) == 1
    assert main(["--backend", REFERENCE, "--replay", str(replay)]) == 0
