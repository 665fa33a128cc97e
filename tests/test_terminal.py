"""Tests that control characters of other texts are escaped: they could clear a terminal."""

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest

from paged_mla import command, doctor
from paged_mla.gpus import Gpu
from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.reports import summary
from paged_mla_conformance.run.reports.report import Report
from paged_mla_conformance.run.subject import Subject
from paged_mla_reference.backend import create as create_reference
from paged_mla_reference.simulator.scenario import save_scenario
from paged_mla_reference.simulator.scenarios import core_scenario

NAME = "a\x1b[31m\u202eb"
SPELLED = r"a\x1b[31m\u202eb"
BACKEND = f"{create_reference.__module__}:{create_reference.__name__}"
COMMANDS = {
    "explain": ["explain", "{bad}"],
    "explain-several": ["explain", "{bad}", "{bad}"],
    "simulate-scenario": ["simulate", "--scenario", "{bad}"],
    "simulate-page": ["simulate", "chunks", "--html", "{new}"],
    "simulate-report": ["simulate", "chunks", "--html", "page.html", "--report", "{report}"],
    "taps": ["taps", "{bad}", "--token", "0", "--out", "{new}"],
    "fuzz-bad": ["fuzz", "--backend", BACKEND, "--replay", "{bad}"],
    "fuzz-right": ["fuzz", "--backend", BACKEND, "--replay", "{scenario}"],
    "fuzz-folder": ["fuzz", "--backend", BACKEND, "--folder", "{bad}"],
    "doctor-option": ["doctor", "{bad}"],
    "simulate-option": ["simulate", "chunks", "--{bad}"],
    "conformance-option": ["conformance", "--quick", "--dims", "{bad}", "{bad}"],
}


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_names_of_files_are_escaped(tmp_path: Path, monkeypatch, capfd, arguments: list[str]):
    monkeypatch.chdir(tmp_path)
    files = {name: f"{name}-{NAME}.json" for name in ("bad", "new", "report", "scenario")}
    Path(files["bad"]).write_text("[")
    Path(files["report"]).write_text('{"results": []}')
    save_scenario(core_scenario("chunks"), Path(files["scenario"]))
    with contextlib.suppress(SystemExit):
        command.main([word.format(**files) for word in arguments])
    told = "".join(capfd.readouterr())
    assert SPELLED in told
    assert told.replace("\n", "").isprintable()


def test_errors_of_a_process_of_the_suite_are_escaped(tmp_path: Path):
    path = tmp_path / f"{NAME}.toml"
    path.write_text("[")
    suite = [sys.executable, "-m", "paged_mla", "conformance", "--quick", "--profile", str(path)]
    done = subprocess.run(suite, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert SPELLED in done.stderr
    assert done.stderr.replace("\n", "").isprintable()


def test_messages_of_a_backend_are_escaped(capsys):
    """Line breaks of a failure remain."""
    report = Report(Subject(parse(["--quick"]).backend), time_limit=0, commit="")
    report.errors.append(f"one\n{NAME}")
    summary.write(report, sys.stdout)
    told = capsys.readouterr().out
    assert f"one\n{SPELLED}" in told
    assert told.replace("\n", "").isprintable()


def test_the_name_of_a_gpu_is_escaped(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_gpus", lambda: [Gpu(NAME, "9.0", "80 GiB", "1")])
    assert doctor.main([]) == 0
    told = capsys.readouterr().out
    assert SPELLED in told
    assert told.replace("\n", "").isprintable()


def test_an_internal_error_is_escaped(monkeypatch, capsys):
    def fail(_options: object) -> None:
        raise RuntimeError(NAME)

    monkeypatch.setattr("paged_mla_reference.simulator.command.simulate", fail)
    assert command.main(["simulate", "chunks"]) == command.INTERNAL_ERROR
    told = capsys.readouterr().err
    assert f"RuntimeError: {SPELLED}" in told
    assert told.replace("\n", "").isprintable()
