"""A wrong command line, or a missing backend: one line states the error, and no test runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from running import FEW, NINE_HEADS, REFERENCE, RIGHT, ROOT, report_of, result_of, run_suite

from paged_mla_conformance.run.options import parse
from paged_mla_conformance.run.plugin import load_backend
from paged_mla_conformance.run.status import BROKEN_BACKEND


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--only", ""), "--only: got ''"),
        (("--profile", ""), "--profile: got ''"),
        (("--dtypes", ""), "--dtypes: got ''"),
        (("--workers", "many"), "--workers: got 'many'; allowed: auto, 0, 1"),
        (("--workers", "-1"), "--workers: got '-1'"),
        (("--timeout", "0"), "--timeout: got '0'; allowed: a finite number > 0"),
        (("--timeout", "soon"), "--timeout: got 'soon'"),
        (("--pdb", "--workers", "2"), "--pdb needs --workers 0"),
        (("-v", "--workers", "2"), "-v needs --workers 0"),
        (("--pdb", "--timeout", "9"), "--pdb waits for input and cannot be used with --timeout"),
        (("-n2",), "got -n2, which changes the suite"),
        (("--ignore=test_merge.py",), "got --ignore=test_merge.py, which changes the suite"),
        (("-o", "python_functions=test_merge"), "got -o, which changes the suite"),
        (("--setup-only",), "got --setup-only, which changes the suite"),
        (("--collect-only",), "got --collect-only, which changes the suite"),
        (("--collectonly",), "got --collectonly, which changes the suite"),
        (("--runxfail",), "got --runxfail, which changes the suite"),
        (("-xo", "python_functions=test_merge"), "got -xo, which changes the suite"),
        (("-xV",), "got -xV, which runs no test"),
        (("-xvs", "--workers", "2"), "-xvs needs --workers 0"),
        (("--co",), "got --co, which changes the suite"),
        (("--junit-xml=x",), "got --junit-xml=x, which writes a file of pytest"),
        (("--log-file=/proc/x",), "got --log-file=/proc/x, which writes a file of pytest"),
        (("--debug=/proc/x",), "got --debug=/proc/x, which writes a file of pytest"),
        (("--version",), "got --version, which runs no test"),
        (("-V",), "got -V, which runs no test"),
        (("--markers",), "got --markers, which runs no test"),
        (("--fixtures",), "got --fixtures, which runs no test"),
        (("--mla-only=x",), "got --mla-only=x, which changes the suite"),
        (("--dump", "x.safetensors"), "--dump needs --only, because a dump contains one step"),
        (("--dump", "/", "--only", "x"), "--dump: got /, which cannot be written"),
        (("--report", ""), "--report: got ''; allowed: a text that is not empty"),
        (("--report", "/"), "--report: got /, which cannot be written"),
        (("--report", "r.html"), "--report: got r.html, which cannot be written"),
    ],
)
def test_a_wrong_option(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
):
    """S-20: the message names the option and the allowed values."""
    with pytest.raises(SystemExit) as ended:
        parse(["--backend", REFERENCE, *arguments])
    assert ended.value.code == pytest.ExitCode.USAGE_ERROR
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_joined_one_letter_options_are_recognized():
    """S-20: ``-xs`` is ``-x -s``, so pytest uses the terminal."""
    assert parse(["--backend", REFERENCE, "-xs"]).on_screen
    assert not parse(["--backend", REFERENCE, "-x", "-kovs"]).on_screen


@pytest.mark.parametrize("argument", ["--color=yes", "--tb=long", "-x", "--maxfail=3", "-kovs"])
def test_other_pytest_options_are_passed_on(argument: str):
    """S-20: an option is not confused with another option that has the same beginning."""
    assert parse(["--backend", REFERENCE, argument]).pytest_arguments[-1] == argument


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "no.such.module:create"), "in the folder that contains it"),
        (("--backend", "misdeclared:raises"), "misdeclared:raises raised RuntimeError: no driver"),
        (("--backend", REFERENCE, "--only", "no-such-case"), "no test or case has the id"),
        (("--backend", REFERENCE, "--only", "decode-h12"), "decode-h12-fp32"),
        (("--backend", REFERENCE, "--dtypes", "fp4"), "allowed: float32,float16,bfloat16"),
        (("--backend", REFERENCE, "--dtypes", "float32,float32"), "each once at most"),
        (("--backend", REFERENCE, "--expected-failures", "/no/file.toml"), "/no/file.toml"),
        (("--backend", REFERENCE, "--no-such-option"), "--no-such-option"),
        (("--backend", REFERENCE, "-k", "("), "-k"),
        (("--backend", REFERENCE, "/"), "got /; allowed: --only ID, or -k EXPRESSION"),
    ],
)
def test_an_error_before_a_run_is_one_line(arguments: tuple[str, ...], message: str):
    """S-20: the command or pytest reports the error in one line, and no test runs."""
    done = run_suite(*arguments)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert message in line
    assert "CONFORMANT" not in done.stdout


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("absent", "has no attribute 'absent'"),
        ("no-callable", "got an object of type int; allowed: a callable"),
        ("no-backend", "a NoneType without the attributes name, version, mode, device"),
        ("a-string", "a str without the attributes name, version, mode, device"),
        ("exits", "raised SystemExit: 0"),
        ("skips", "raised Skipped: not today"),
        ("raises", "raised RuntimeError: no driver"),
        ("strange-mode", "mode: got 'tpu'; allowed: cpu, gpu, interpreter"),
        ("version-of-numbers", "version: got 1.0; allowed: str"),
        ("no-capabilities", "allowed: Capabilities"),
        ("ops-in-a-list", "capabilities.ops: got ['attend']; allowed: frozenset"),
        ("strange-op", "capabilities.ops: got 'atend'; allowed: append, attend, gather_context"),
        (
            "strange-feature",
            "capabilities.features: got 'paddings'; allowed: batch_invariant, bounded, ",
        ),
        ("strange-mask", "capabilities.masks: got 'tree'; allowed: causal, non_causal, tree:full"),
        ("strange-dtype", "capabilities.dtypes: got 'fp32'; allowed: bfloat16, float16, float32"),
        ("sizes-in-words", "capabilities.block_sizes: got '64'; allowed: integers"),
        ("sizes-of-numpy", "); allowed: integers >= 1 of type int"),
        (
            "only-huge-blocks",
            "capabilities.block_sizes: got [131072]; allowed: at least one integer from 1 to 65536",
        ),
        ("flat-head-dims", "; allowed: pairs of integers (R, P)"),
        ("flat-prefill-dims", "; allowed: triples of integers (N, P, V)"),
        ("bounded-in-name", "prepare_unchecked: got None; allowed: a method, to declare 'bounded'"),
        ("endless-queries", "capabilities.max_query_len: got inf; allowed: an integer"),
    ],
)
def test_a_factory_that_makes_no_backend(factory: str, message: str):
    """S-20: the declaration of a backend is checked before the first test."""
    refused(f"misdeclared:{factory}", message)


def test_a_backend_without_an_attribute():
    """S-20: the message names the missing attribute."""
    refused("meddling:without_a_device", "without the attributes device")


def refused(backend: str, message: str) -> None:
    """Check that loading a backend fails with a message in one line."""
    with pytest.raises(pytest.UsageError) as raised:
        load_backend(backend)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize(
    "where",
    ["", "file/r.json", "pipe", "r.json"],
    ids=["a-folder", "below-a-file", "a-pipe", "html-in-a-pipe"],
)
def test_a_report_that_cannot_be_written(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """S-20: the error is reported before the first test."""
    (tmp_path / "file").write_text("")
    os.mkfifo(tmp_path / "pipe")
    os.mkfifo(tmp_path / "r.html")
    path = tmp_path / where
    with pytest.raises(SystemExit):
        parse(["--backend", RIGHT, "--report", str(path)])
    assert f"--report: got {path}, which cannot be written" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()


def test_an_older_report_is_removed_first(tmp_path: Path):
    """S-20: files at the paths of a report are always from the last run."""
    paths = [tmp_path / f"r.{suffix}" for suffix in ("json", "html", "xml")]
    for path in paths:
        path.write_text("old")
    parse(["--backend", RIGHT, "--report", str(paths[0])])
    assert not any(path.exists() for path in paths)


def test_a_backend_that_cannot_run_here_is_skipped():
    """The reason is printed, and the status shows that no test ran."""
    done = run_suite("--backend", "no_device:create")
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "SKIPPED: no_device:create cannot run here: no such device" in done.stderr


def test_a_backend_that_cannot_be_imported_is_an_error():
    """S-20: the traceback is printed from the backend's first line on, and nothing is skipped."""
    done = run_suite("--backend", "no_package:create")
    assert done.returncode == BROKEN_BACKEND
    said = done.stderr.splitlines()
    missing = "No module named 'a_package_nobody_has'"
    assert said[0] == f"--backend no_package:create cannot be imported: {missing}"
    assert said[1].startswith("Traceback")
    assert "no_package.py" in said[2]
    assert said[-1] == f"ModuleNotFoundError: {missing}"
    assert "SKIPPED" not in done.stderr


@pytest.mark.parametrize("factory", ["create", "in_the_words_of_a_library"])
def test_a_test_without_memory_is_skipped(factory: str, tmp_path: Path):
    """Too little memory is not a failure; the summary and the verdict count the skipped test."""
    report = report_of(tmp_path, "--backend", f"no_memory:{factory}", *FEW)
    assert report["status"] == 0
    assert report["totals"]["skipped"] == 1
    reason = "the device has too little memory"
    assert result_of(report, NINE_HEADS)["reason"] == reason
    assert f"skipped, 1 test: {reason}" in report["printed"].splitlines()
    assert "3 passed, 1 skipped" in report["verdict"]


def test_a_schedule_without_memory_is_skipped(tmp_path: Path):
    """A run in which no test ran is not conformant."""
    test = "test_trace[trace-preemption-fp32]"
    report = report_of(tmp_path, "--backend", "no_memory:everywhere", "--only", test)
    assert result_of(report, test)["reason"] == "the device has too little memory"
    assert report["reasons_against"] == ["no test ran"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--modes", "m", "--gpu-tests"),
            "argument --gpu-tests: not allowed with argument --modes",
        ),
        (("--modes", "m", "--backend", RIGHT), f"--backend: got {RIGHT}; allowed: only without"),
        (("--gpu-tests", "--backend", RIGHT), f"--backend: got {RIGHT}; allowed: only without"),
        (("--modes", "m", "--report=r.json"), "--report is not allowed with --modes"),
        (("--modes", "m", "--profile", "sglang"), "--profile is not allowed with --modes"),
    ],
    ids=["two-tasks", "modes-backend", "tests-backend", "modes-report", "modes-profile"],
)
def test_options_that_run_here_ignores_are_errors(arguments: tuple[str, ...], message: str):
    """``ci.run_here`` starts nothing with options that would have no effect."""
    command = [sys.executable, "-m", "ci.run_here", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
