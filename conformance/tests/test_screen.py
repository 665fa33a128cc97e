"""The origin of a NaN on the screen of a failing run, and the dump of a replay."""

from __future__ import annotations

from pathlib import Path

import pytest
from running import MUTANTS, last_line, report_of, run_suite

from paged_mla_reference.explain.explanation import explain
from paged_mla_shared.dump import load_dump


@pytest.mark.parametrize(
    ("mutant", "only", "rule", "origin"),
    [
        ("unused-slots-weigh-zero", "decode-h9-fp32", "S-9", "that the step does not own was read"),
        (
            "empty-rows-divide-zero-by-zero",
            "empty-one-row-fp32",
            "S-6",
            "was computed, or was left in a buffer",
        ),
    ],
)
def test_a_nan_is_traced_to_its_origin(
    tmp_path: Path, mutant: str, only: str, rule: str, origin: str
):
    """S-9: a test that gave NaN runs again over memory that holds finite numbers."""
    report = report_of(tmp_path, "--backend", f"{MUTANTS}:{mutant}", "--only", only)
    [cause] = report["causes"]
    assert (cause["rule"], cause["what"], cause["kind"]) == (rule, "out", "NaN")
    assert origin in cause["sentence"]
    assert f"cause: {cause['sentence']}" in report["printed"]
    assert len(report["results"]) == 1


def test_a_replay_leads_to_the_fault(tmp_path: Path):
    """S-20: explain reads the dump of the replay and names its fault."""
    dump = tmp_path / "failed.safetensors"
    replay = ("--backend", f"{MUTANTS}:lse-in-base-2", "--only", "decode-h9-fp32")
    done = run_suite(*replay, "--dump", str(dump))
    assert f"explain: paged-mla explain {dump}" in done.stdout.splitlines()
    found = explain(load_dump(dump))
    assert found.best[0].hypothesis.name == "lse-in-base-2"


def test_a_replay_that_passes_has_no_dump(tmp_path: Path):
    """S-20: an older dump is removed, and the screen states why there is no new one."""
    dump = tmp_path / "failed.safetensors"
    dump.write_text("older")
    done = run_suite(
        "--backend", f"{MUTANTS}:right", "--only", "decode-h9-fp32", "--dump", str(dump)
    )
    assert done.returncode == 0
    assert not dump.exists()
    reason = "no test failed at a step that a dump can contain"
    assert f"{dump} was not written: {reason}" in done.stdout
    assert last_line(done.stdout).startswith("PASSED in part: ")
