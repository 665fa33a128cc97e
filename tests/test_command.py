"""Tests of the command ``paged-mla``: help, errors, and each subcommand."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paged_mla import command

IN_A_COMMAND = {  # a function that each subcommand calls
    "explain": "paged_mla_reference.explain.command.load_dump",
    "simulate": "paged_mla_reference.simulator.command.timeline_of",
    "taps": "paged_mla_optimized.commands.taps.load_dump",
    "doctor": "paged_mla.doctor.find_gpus",
}
WITHOUT_PYTEST = """
import sys
sys.modules["pytest"] = None  # as if it were not installed
from paged_mla.command import main
sys.exit(main(["conformance", "--quick"]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process, as a shell does."""
    return subprocess.run(
        [sys.executable, "-m", "paged_mla", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def test_without_arguments_it_lists_every_subcommand_and_an_example():
    done = run()
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in command.SUBCOMMANDS)
    assert "Example: paged-mla conformance --quick" in done.stdout


@pytest.mark.parametrize("name", command.SUBCOMMANDS)
def test_each_subcommand_describes_itself_in_sentences_with_an_example(name: str, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--help"])
    help_text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    assert help_text.startswith(f"usage: paged-mla {name} ")
    assert f"example: paged-mla {name} " in help_text.replace("TRITON_INTERPRET=1 ", "")


@pytest.mark.parametrize("name", sorted(set(command.SUBCOMMANDS) - {"conformance"}))
def test_the_error_of_a_wrong_command_line_has_one_line(name: str, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([name, "--head=none", "--gpus=none"])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"paged-mla {name}: ")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["simulate", "huge"], "argument NAME"),
        (["simulate", "chunks", "--trace", "x", "--dims", "huge"], "argument --dims"),
        (["simulate", "chunks", "--trace", "x", "--dtype", "huge"], "argument --dtype"),
        (["simulate", "--log", "x", "--order", "huge"], "argument --order"),
        (["fuzz", "--backend", "x", "--dims", "huge"], "argument --dims"),
    ],
)
def test_the_error_of_an_unknown_word_lists_the_allowed_words(
    arguments: list[str], named: str, capsys
):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert line.startswith(f"paged-mla {arguments[0]}: {named}: got 'huge'; allowed: ")


def test_the_error_of_unknown_dims_lists_the_allowed_dims(capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["conformance", "--quick", "--dims", "huge"])
    [line] = capsys.readouterr().err.splitlines()
    assert ended.value.code == 4
    assert line.startswith("paged-mla conformance: argument --dims: got 'huge'; allowed: ")


def test_the_error_of_an_unknown_subcommand_lists_the_allowed_ones():
    done = run("confromance")
    assert done.returncode == 2
    assert "unknown command 'confromance'; allowed: conformance, judge, explain" in done.stderr


def test_a_missing_package_is_named_with_the_extra_that_installs_it():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PYTEST], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        'paged-mla conformance needs pytest: pip install "paged-mla[conformance]"\n'
    )


@pytest.mark.parametrize("error", [OverflowError, ValueError, AssertionError, MemoryError])
@pytest.mark.parametrize(("name", "at"), IN_A_COMMAND.items(), ids=IN_A_COMMAND)
def test_an_internal_error_has_its_own_status(
    tmp_path: Path, monkeypatch, capsys, name: str, at: str, error: type[Exception]
):
    """A script must be able to distinguish it from a broken rule (1) and a wrong file (2)."""

    def fail(*_arguments: object, **_options: object) -> None:
        raise error("of the test")

    monkeypatch.setattr(at, fail)
    arguments = {
        "explain": [str(tmp_path / "step.safetensors")],
        "simulate": ["chunks"],
        "taps": [str(tmp_path / "step"), "--token", "0", "--out", str(tmp_path / "taps")],
    }
    assert command.main([name, *arguments.get(name, [])]) == command.INTERNAL_ERROR == 70
    told = capsys.readouterr().err
    assert "Traceback" in told
    assert f"{error.__name__}: of the test" in told
    assert told.endswith("paged-mla: this is an error of paged-mla itself, not a result\n")


@pytest.mark.parametrize(
    ("given", "status", "told"),
    [
        (">/dev/full", 2, "paged-mla: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        ("| exec true", 141, ""),
    ],
)
def test_an_output_that_cannot_be_written_is_not_an_internal_error(
    given: str, status: int, told: str
):
    """The output is a full disk, closed, or a pipe without a reader."""
    wait = "sleep 1; " if given.startswith("|") else ""  # until the reader has ended
    line = f"({wait}exec {sys.executable} -m paged_mla --help) {given}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (status, told)


def test_the_help_names_each_exit_status():
    help_text = command.usage()
    for status in (0, 1, 2, 70):
        assert re.search(rf"\b{status}, (nothing|something|a wrong|an error)", help_text)


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["simulate", "chunks", "--html"], "--html"),
        (["simulate", "chunks", "--save"], "--save"),
        (["simulate", "chunks", "--trace"], "--trace"),
        (["explain", "step.safetensors", "--html"], "--html"),
        (["explain", "step.safetensors", "--png"], "--png"),
        (["taps", "step.safetensors", "--token", "0", "--out"], "--out"),
    ],
)
@pytest.mark.parametrize("place", ["folder", "file/inside", "file/../folder"])
def test_a_path_that_cannot_be_written_is_an_error_before_the_work(
    tmp_path: Path, monkeypatch, capsys, place: str, arguments: list[str], option: str
):
    for at in IN_A_COMMAND.values():
        monkeypatch.setattr(at, lambda *_: pytest.fail("the work started"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("as it was")
    path = tmp_path / place
    assert command.main([*arguments, str(path)]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paged-mla {arguments[0]}: {option}: got {path}, which cannot be wri")
    assert (tmp_path / "file").read_text() == "as it was"


def test_an_error_leaves_an_existing_file_unchanged(tmp_path: Path, monkeypatch):
    """A file is replaced only if the command succeeds."""
    page = tmp_path / "page.html"
    page.write_text("as it was")
    monkeypatch.setattr("paged_mla_reference.simulator.work.MOST_WORK", 10)
    assert command.main(["simulate", "chunks", "--html", str(page)]) == 2
    assert page.read_text() == "as it was"


def test_simulate_draws_a_schedule(tmp_path: Path):
    page = tmp_path / "preemption.html"
    done = run("simulate", "preemption", "--html", str(page))
    assert done.returncode == 0
    assert f"wrote {page}" in done.stdout
    assert page.read_text().startswith("<!doctype html>")


def test_a_backend_in_the_current_folder_is_found(tmp_path: Path):
    """The installed script starts with only its own folder on the path."""
    (tmp_path / "my_mla.py").write_text("from paged_mla_reference.backend import create\n")
    code = "import sys; sys.path.remove(''); from paged_mla.command import main; sys.exit(main())"
    arguments = ["fuzz", "--backend", "my_mla:create", "--skip-corpus", "--schedules", "1"]
    none = ["--production", "0", "--examples", "0", "--cases", "0"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, *none],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, map(_absolute, sys.path)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _absolute(path: str) -> str:
    return str(Path(path).resolve()) if path else ""


def test_fuzz_searches_the_reference():
    done = run(
        *("fuzz", "--backend", "paged_mla_reference.backend:create", "--skip-corpus"),
        *("--schedules", "1", "--production", "0", "--examples", "0", "--cases", "0"),
    )
    assert done.returncode == 0, done.stderr
    assert "1 schedules" in done.stdout
