"""The search of ``tests_gpu/fuzz`` in Triton's interpreter: what it draws, and that it can fail."""

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

# In front of optimized/tests_misuse, which has modules of these names; started processes get it.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests_gpu/fuzz"))

from asking import ask
from combinations import BATCH_INVARIANT, GRAPHED, PREFILL, combinations
from crew import Crew, Job
from drawing import draw
from search import RIGHT, TOO_FEW, WRONG, run

from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.config.architectures import INTERPRETER
from paged_mla_optimized.planning.families import FAMILIES, PORTABLE, TILE_FP8
from paged_mla_shared.formats import FORMATS

FOLDER = Path(__file__).parents[1] / "tests_gpu" / "fuzz"
NAMES = {str(c): c for c in combinations(INTERPRETER)}
FP32 = NAMES["portable/fp32/eager"]


def options(**changes):
    return argparse.Namespace(
        **{
            "seconds": 60.0,
            "workers": 0,
            "seed": 0,
            "least": 2,
            "steps": 2,
            "device": "cpu",
            "fewer_keys": False,
            "only": "portable/fp32/eager",
            "replay": None,
        }
        | changes
    )


def drawn(combination=FP32, steps=2, arch=INTERPRETER, **changes):
    return draw(combination, **{"seed": 0, "number": 0, "steps": steps, "arch": arch} | changes)


def plant(monkeypatch, attends):
    """Change one element of an output, from attend number `attends` on."""
    attend, count = EagerRunner.attend, iter(range(10**6))

    def spoiled(self, batch):
        answer = attend(self, batch)
        if next(count) >= attends:
            answer.out[0, 0, 0] += 1
        return answer

    monkeypatch.setattr(EagerRunner, "attend", spoiled)


def test_every_family_format_and_mode_is_wanted():
    found = combinations("sm90")
    assert {c.family for c in found} >= {*FAMILIES, PREFILL}
    assert {c.cache_format for c in found if c.family == PORTABLE} == {*FORMATS}
    assert {c.mode for c in found if c.family == TILE_FP8} == {
        "fast", "fast-batch_invariant", "fast-graphed",
    }  # fmt: skip
    running = {(c.family, c.cache_format, c.running) for c in found}
    assert all(
        {(family, stored, BATCH_INVARIANT), (family, stored, GRAPHED)} <= running
        for family, stored, _ in running
        if family in FAMILIES
    )


@pytest.mark.parametrize("combination", combinations("sm90"), ids=str)
def test_a_draw_is_its_number_and_is_served_by_its_family(combination):
    found = drawn(combination, steps=20, arch="sm90")
    assert found == drawn(combination, steps=20, arch="sm90")
    assert found.case != drawn(combination, steps=20, arch="sm90", number=1).case
    if not combination.is_prefill:
        assert found.families("sm90").count(combination.family) >= 12


def test_rows_have_fewer_keys_than_queries_with_the_option():
    """S-2: without a causal mask alone."""
    for number in range(20):
        for fewer in (False, True):
            case = drawn(steps=20, arch="sm90", number=number, fewer_keys=fewer).case
            rows = [row for step in case.steps for row in step]
            found = any(0 < row.seq_len < row.query_len for row in rows)
            assert not found or (fewer and case.mask == "non_causal")
            if found:
                return
    pytest.fail("no such row in 20 draws")


@pytest.mark.parametrize("name", ["portable/fp8_e4m3/fast", "portable_prefill/fp32/eager"])
def test_right_steps_are_counted(name):
    outcome = ask(drawn(NAMES[name]))
    assert not outcome.failure
    assert outcome.reached == [NAMES[name]] * 2


def test_a_wrong_step_is_reported_and_those_before_it_count(monkeypatch):
    plant(monkeypatch, 1)
    outcome = ask(drawn())
    assert re.search(r"step 1 of 2, .*\[S-5\] out: 1 of", outcome.failure, re.DOTALL)
    assert outcome.reached == [FP32]
    assert not outcome.is_fatal


def test_a_failure_is_reported_with_the_command_that_runs_it_again(monkeypatch, capsys):
    with monkeypatch.context() as planted:
        plant(planted, 0)
        assert run(options(seconds=0.01)) == WRONG
        told = capsys.readouterr().out
        assert "FAILED portable/fp32/eager/0, seed 0: step 0 of 2" in told
        assert "again: python optimized/tests_gpu/fuzz --replay portable/fp32/eager/0" in told
        assert run(options(replay="portable/fp32/eager/0")) == WRONG
    assert run(options(replay="portable/fp32/eager/0")) == RIGHT


def test_too_few_draws_are_no_success(capsys):
    assert run(options(seconds=0.01, least=3)) == TOO_FEW
    assert "fewer than 3 draws of 1 combinations: portable/fp32/eager 2" in capsys.readouterr().out


def test_the_command_runs_in_processes():
    told = subprocess.run(
        [
            *(sys.executable, str(FOLDER), "--device", "cpu", "--workers", "1", "--seconds", "1"),
            *("--steps", "2", "--least", "2", "--only", "portable/fp32/eager"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == RIGHT, told.stdout + told.stderr
    assert "2 draws of 1 configurations" in told.stdout


@dataclass(frozen=True, kw_only=True)
class Dying(Job):
    def run(self):
        os._exit(7)


def test_a_process_that_ends_fails_the_draw_it_had_in_hand():
    jobs = [Dying(combination=FP32, number=4, seed=0, steps=1, arch=INTERPRETER)]
    taken = []
    crew = Crew(1, lambda: jobs.pop() if jobs else None, lambda _, outcome: taken.append(outcome))
    assert crew.run(30.0, lambda: None) == []
    assert [(o.number, o.failure) for o in taken] == [(4, "the process ended with status 7")]
