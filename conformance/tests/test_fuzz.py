"""The search finds, shrinks, prints and replays failing schedules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import no_memory
import pytest

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.backends import MutantBackend, mutant
from paged_mla_conformance.search import machine, steps
from paged_mla_conformance.search.command import main, replay
from paged_mla_conformance.search.corpus import corpus_files, load_case, save_case
from paged_mla_conformance.search.machine import REPLAY_FILE
from paged_mla_conformance.search.sweep import Sweep
from paged_mla_reference.backend import create
from paged_mla_reference.simulator.scenario import load_scenario
from paged_mla_shared.cases import GROUPS
from paged_mla_shared.dims import SMALL
from paged_mla_shared.errors import InvalidArgument

REFERENCE = "paged_mla_reference.backend:create"
REFUSED = "paged-mla fuzz: --backend"


def test_generated_schedules_through_the_reference():
    """S-19: a few numbered schedules in every dtype reach most situations."""
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
    for name, message in sweep.failures.items():
        assert f"trace {name.replace('schedule ', 'generated-')}, step " in message


def test_the_command_sweeps_and_searches(capsys: pytest.CaptureFixture[str]):
    """S-19: the reference passes both, and the coverage table is printed."""
    few = ["--schedules", "2", "--production", "1", "--examples", "5", "--cases", "20"]
    assert main(["--backend", REFERENCE, *few]) == 0
    printed = capsys.readouterr().out
    assert "eviction of a formerly shared block" in printed
    assert "2 schedules" in printed
    assert "hypothesis: no failing case" in printed
    assert "hypothesis: no failing schedule" in printed


def test_the_search_uses_only_declared_capabilities(capsys: pytest.CaptureFixture[str]):
    """S-20: a backend that refuses undeclared problems passes all that runs."""
    few = ["--schedules", "6", "--production", "8", "--examples", "3", "--cases", "10"]
    assert main(["--backend", "causal_only:narrow", *few]) == 0
    assert " not supported, 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "5"])
def test_a_search_in_which_nothing_runs_fails(steps: str):
    """S-20: every schedule needs rows of several lengths."""
    nothing = ["--skip-corpus", "--production", "0", "--examples", "0", "--cases", "0"]
    numbered = ["--schedules", "3", "--steps", steps]
    assert main(["--backend", "closed:without_mixed", *nothing, *numbered]) == 1


def test_a_search_without_memory_fails(capsys: pytest.CaptureFixture[str]):
    """S-20: case 0 is skipped, so that nothing runs."""
    numbered = ["--skip-corpus", "--schedules", "0", "--examples", "0", "--cases", "0"]
    backend = ["--backend", "no_memory:in_prepare", "--production", "1"]
    assert main([*backend, *numbered]) == 1
    assert ": 1 skipped (too little memory), 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("backend", "status", "message"),
    [
        ("no.such.module:create", 2, f"{REFUSED} no.such.module:create: No module named 'no'"),
        ("misdeclared:raises", 2, f"{REFUSED} misdeclared:raises raised RuntimeError"),
        ("misdeclared:no-dtype", 2, f"{REFUSED} misdeclared:no-dtype: capabilities.dtypes: got "),
        ("no_device:create", 5, "SKIPPED: no_device:create cannot run here: no such device"),
    ],
)
def test_a_search_without_a_backend(
    backend: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
):
    """S-20: one line states why nothing runs."""
    assert main(["--backend", backend]) == status
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(message)


def test_a_search_whose_backend_cannot_be_imported(capsys: pytest.CaptureFixture[str]):
    """S-20: the traceback is printed."""
    assert main(["--backend", "no_package:create"]) == 2
    assert "no_package.py" in capsys.readouterr().err


@pytest.mark.parametrize("backend", [no_memory.everywhere, no_memory.in_prepare])
def test_too_little_memory_is_not_a_failure(backend: Callable[[], MutantBackend], tmp_path: Path):
    """A sweep counts the schedules and cases without memory as skipped."""
    sweep, tiny = Sweep(), backend()
    sweep.run(tiny, SMALL, ("float32",), 4)
    sweep.run_case(tiny, SMALL, ("float32",), 2, tmp_path)
    assert (sweep.without_memory, sweep.failures) == (2, {})
    assert (sweep.schedules, sweep.cases) == (0, 0)
    assert "2 skipped (too little memory), 0 failures" in sweep.summary()
    assert not [*tmp_path.iterdir()]


def test_a_replay_without_memory_is_skipped(capsys: pytest.CaptureFixture[str]):
    [path] = [path for path in corpus_files() if path.stem == "answers-share-one-buffer"]
    assert replay(no_memory.everywhere(), SMALL, "float32", path)
    assert capsys.readouterr().out.endswith(": skipped: the device has too little memory\n")


def test_a_drawn_schedule_without_memory_is_skipped(tmp_path: Path):
    """The error of ``prepare`` does not end the search; hypothesis draws other schedules."""
    tiny = no_memory.in_prepare()
    machine.search(tiny, SMALL, "float32", tmp_path, examples=3, seed=0)
    assert not [*tmp_path.iterdir()]


def test_a_failure_is_shrunk_printed_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-19: the smallest failing schedule is printed as a table and written to a replay file."""
    wrong = "paged_mla_conformance.meta.mutants.backends:context-is-added-twice"
    search = ["--backend", wrong, "--schedules", "0", "--production", "0", "--cases", "0"]
    search += ["--examples", "40", "--skip-corpus"]
    assert main([*search, "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "trace fuzz, step" in printed
    assert "r0: prefill 0+1" in printed
    replay = tmp_path / REPLAY_FILE
    assert str(replay) in printed
    assert len(load_scenario(replay).requests) == 1
    assert main(["--backend", wrong, "--replay", str(replay)]) == 1
    assert main(["--backend", REFERENCE, "--replay", str(replay)]) == 0


def test_a_failing_case_is_shrunk_printed_and_replayed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-17: the smallest failing case is printed as a literal and written to a replay file."""
    wrong = "paged_mla_conformance.meta.mutants.backends:slots-follow-positions"
    search = ["--backend", wrong, "--skip-corpus", "--schedules", "0", "--examples", "0"]
    search += ["--production", "0"]
    assert main([*search, "--cases", "200", "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "[S-1] slot_mapping" in printed
    assert "seed 0" in printed
    path = tmp_path / steps.REPLAY_FILE
    assert str(path) in printed
    case, _ = load_case(path)
    assert repr(case) in printed
    assert case.max_query_len == 3  # two siblings and their parent
    assert main(["--backend", wrong, "--replay", str(path)]) == 1
    assert main(["--backend", REFERENCE, "--replay", str(path)]) == 0


@pytest.mark.parametrize("group", GROUPS)
def test_a_case_survives_its_file(group: str, tmp_path: Path):
    """S-17: every field is read back."""
    for case in GROUPS[group]:
        save_case(case, "float16", tmp_path / "case.json")
        assert load_case(tmp_path / "case.json") == (case, "float16")


def test_another_version_is_refused(tmp_path: Path):
    """S-17: a file with another version of the format is refused."""
    path = tmp_path / "case.json"
    path.write_text('{"version": 0, "dtype": "float32", "case": {}}')
    with pytest.raises(InvalidArgument, match="version"):
        load_case(path)


@pytest.mark.parametrize("path", corpus_files(), ids=lambda path: path.stem)
def test_the_reference_passes_the_corpus(path: Path):
    """S-19: the reference passes every case and schedule that failed once."""
    assert replay(create(), SMALL, "float32", path)


@pytest.mark.parametrize(
    "path", [p for p in corpus_files() if p.stem in MUTANTS], ids=lambda path: path.stem
)
def test_mutants_fail_their_file_of_the_corpus(path: Path):
    """S-19: a mutant fails the file with its name."""
    assert not replay(mutant(path.stem), SMALL, "float32", path)
