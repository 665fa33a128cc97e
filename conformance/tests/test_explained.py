"""The measurement of explanations prints and writes its numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paged_mla_conformance.meta.explained import dumps
from paged_mla_conformance.meta.explained.__main__ import main
from paged_mla_conformance.meta.explained.page import Results
from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_shared.dump import load_dump

KILLS = {
    "lse-in-base-2": {
        "extend": {"rule": "test_extend[extend-fresh-q1-fp32]"},
        "decode": {"rule": "test_decode[decode-bs1-fp32]"},
    },
    "the-last-token-is-not-written": {"empty": {"rule": "test_empty[empty-h1-bs1-fp32]"}},
    "one-inline-scale-serves-the-row": {
        "decode": {"rule": "test_decode[decode-bs1-fp32-fp8_ds_mla]"}
    },
    "prefill-is-always-causal": {
        "prefill": {"rule": "test_prefill[prefill-chunks-many-rows-fp32]"}
    },
    "a-given-query-scale-is-ignored": {
        "queries": {"rule": "test_queries[queries-two-steps-scale-0.03-fp32]"}
    },
    "a-live-block-is-evicted": {},
}
NAMES = tuple(KILLS)[:-1]


def matrix_of(folder: Path, kills: dict[str, dict[str, dict[str, str]]]) -> Path:
    """Write a matrix as ``nox -s mutants`` does."""
    path = folder / "matrix.json"
    mutants = [{"name": name, "kills": groups} for name, groups in kills.items()]
    path.write_text(json.dumps({"mutants": mutants}))
    return path


def test_mutants_faults_and_right_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """S-5, S-7, S-10: a few of each kind are explained; the dumps and the page are written."""
    monkeypatch.chdir(tmp_path)
    page, matrix = tmp_path / "page.md", tmp_path / "matrix.json"
    mutants = [{"name": name, "kills": kills} for name, kills in KILLS.items()]
    matrix.write_text(json.dumps({"mutants": mutants}))
    some = [
        "--matrix",
        str(matrix),
        "--single",
        "5",
        "--healthy",
        "10",
        "--save",
        str(tmp_path),
        "--page",
        str(page),
    ]
    assert main([*NAMES, "a-live-block-is-evicted", *some]) == 0
    said = capsys.readouterr().out
    assert "mutants with a dump: 5 of 6" in said
    assert "first broken rule right: 5 of 5" in said
    assert "fault named first, of one dump: 5 of 5" in said
    assert "single faults, first broken rule right: 5 of 5" in said
    assert "right steps called broken: 0 of 10" in said
    assert "| first broken rule right | 5 of 5, 100.0% |" in page.read_text()
    for name in NAMES:
        assert name in load_dump(tmp_path / f"{name}.safetensors").origin


def test_the_page_describes_the_method_as_the_code_does():
    """S-7: every part of the written page after the first is on the page of the project."""
    page = (Path(__file__).parents[1] / "docs" / "explained.md").read_text()
    _, _, *parts = Results().markdown().partition("\n| | |\n")[0].split("\n\n")
    assert len(parts) == 2
    assert all(part in page for part in parts)


def test_without_a_matrix_the_tests_are_those_of_the_quick_verdicts_table():
    """S-7: each test has its name in float32."""
    tests = dumps.tests_of_the_table()
    assert set(tests) <= set(MUTANTS)
    assert all("+" not in test for found in tests.values() for test in found)
    failed = next(dumps.failures("lse-in-base-2", tests["lse-in-base-2"]))
    assert failed.test in tests["lse-in-base-2"]


@pytest.mark.parametrize("text", [None, "[]", "{}"])
def test_an_invalid_matrix_is_refused(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-20: one line states the error in the file."""
    path = tmp_path / "mutants.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["lse-in-base-2", "--matrix", str(path)])
    assert ended.value.code == 2
    assert f"--matrix: {path}: got " in capsys.readouterr().err


def test_a_tie_is_ended_by_another_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """S-5: several faults explain the first step, and only one explains both steps."""
    monkeypatch.chdir(tmp_path)
    name = "one-key-too-many"
    kills = {
        "decode": {"rule": "test_decode[decode-bs1-fp32]"},
        "extend": {"rule": "test_extend[extend-fresh-q1-fp32]"},
    }
    matrix = ["--matrix", str(matrix_of(tmp_path, {name: kills}))]
    assert main([name, *matrix, "--single", "0", "--healthy", "0", "--save", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "place 2, 4 alike, of 2 dumps 1" in said
    assert "fault named first, of one dump: 0 of 1" in said
    assert "fault named first, of up to three dumps: 1 of 1" in said
    origins = [load_dump(tmp_path / f"{name}{end}.safetensors").origin for end in ("", "-2")]
    assert len(set(origins)) == 2


def test_an_output_of_another_type_has_no_dump():
    """S-5: a dump can only contain outputs of the problem's type."""
    name, shown = "layers-answer-in-float64", "test_layer_whole[layer-prompts-fp32]"
    assert not list(dumps.failures(name, [shown]))


def test_cases_that_a_format_does_not_allow_are_not_tried():
    """S-11: scale groups of a quarter of a block do not exist in blocks of 1 token."""
    shown = "test_gather[gather-strided-fp32-fp8_block_group]"
    assert list(dumps.failures("codes-are-truncated", [shown])) == []


def test_a_kill_by_bad_input_is_replaced_by_a_case(tmp_path: Path):
    """S-21: a dump needs a step of a case, and every mutant of prefill fails one."""
    matrix = tmp_path / "mutants.json"
    kills = {
        "prefill": {"rule": "test_bad_prefill[q-nope-dtype]"},
        "errors": {"rule": "test_bad[x]"},
    }
    matrix.write_text(json.dumps({"mutants": [{"name": "a", "kills": kills}]}))
    [step, other] = dumps.tests_that_kill(matrix)["a"]
    assert step.startswith("test_prefill[prefill-")
    assert other == "test_bad[x]"


def test_unknown_mutants_are_refused(capsys: pytest.CaptureFixture[str]):
    """The command refuses them before anything runs."""
    with pytest.raises(SystemExit):
        main(["no-such-mutant"])
    assert "no-such-mutant" in capsys.readouterr().err
