"""Backends that end or block their process: the run continues, names the test and fails."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from running import FEW, NINE_HEADS, last_line, report_of, result_of, start_suite

REAL_TIME = pytest.mark.skipif(
    getattr(signal, "SIGRTMIN", 0) != 34, reason="signal 35 has a name on this system"
)


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("exits", "ended with status 0"),
        ("segfaults", "was killed by SIGSEGV"),
        pytest.param("is-killed", "was killed by signal 35", marks=REAL_TIME),
    ],
)
def test_a_process_that_ends_fails_its_test(backend: str, how: str, workers: str, tmp_path: Path):
    """S-20: the test is named with its replay command; all other tests have their results."""
    report = report_of(tmp_path, "--backend", f"ending:{backend}", "--workers", workers, *FEW)
    assert report["status"] == 1
    assert not report["conformant"]
    assert (report["totals"]["passed"], report["totals"]["failed"]) == (3, 1)
    ended = result_of(report, NINE_HEADS)
    assert (ended["outcome"], ended["end"]) == ("failed", "died")
    assert how in ended["message"]
    assert f"--only '{NINE_HEADS}'" in ended["replay"]
    assert ended["replay"] in report["printed"]
    assert last_line(report["printed"]) == report["verdict"]
    assert report["verdict"].startswith("FAILED in part: ")


def test_a_crash_comes_with_its_stack(tmp_path: Path):
    """S-20: the message contains the last output of the process."""
    message = result_of(report_of(tmp_path, "--backend", "ending:segfaults", *FEW), NINE_HEADS)
    assert "ending.py" in message["message"]


@pytest.mark.parametrize("backend", ["segfaults", "hangs"])
def test_the_stack_is_of_the_thread_that_ran_the_test(backend: str, tmp_path: Path):
    """S-20: the stacks of other threads, which only wait, are not in the message."""
    threaded = f"ending:{backend}-beside-threads"
    report = report_of(tmp_path, "--backend", threaded, "--timeout", "3", "--only", NINE_HEADS)
    message = result_of(report, NINE_HEADS)["message"]
    assert "in end" in message
    assert "in _wait" not in message


def test_a_backend_that_always_ends_is_given_up(tmp_path: Path):
    """S-20: the report counts the tests without a result."""
    report = report_of(tmp_path, "--backend", "ending:exits-always")
    assert report["status"] == 1
    assert report["verdict"].startswith("NOT CONFORMANT: exits-always")
    assert any("gave up" in reason for reason in report["reasons_against"])
    assert any("no result" in reason for reason in report["reasons_against"])


def test_one_cause_costs_no_other_test(tmp_path: Path):
    """S-20: if a backend ends in many tests of one group, all other tests still run."""
    few = ("-k", "decode-h and not 2k", "--dtypes", "float32")
    report = report_of(tmp_path, "--backend", "ending:exits-often", *few)
    died = {r["test"] for r in report["results"] if r.get("end") == "died"}
    heads = (3, 6, 9, 12, 24, 48, 96)
    assert died == {f"test_decode[decode-h{number}-fp32]" for number in heads}
    assert report["totals"]["unanswered"] == 0
    assert report["reasons_against"] == [f"{len(heads)} failing tests"]


def test_a_process_that_can_no_longer_load_the_backend_is_replaced(tmp_path: Path):
    """S-20: a fault may outlast the process that caused it, so another process tries again."""
    (tmp_path / "loads").write_text("")
    environment = {"LOADS": str(tmp_path / "loads")}
    report = report_of(tmp_path, "--backend", "ending:fails_to_load_once", *FEW, **environment)
    assert len((tmp_path / "loads").read_text()) == 3
    assert (report["totals"]["passed"], report["totals"]["failed"]) == (3, 1)
    assert report["reasons_against"] == ["1 failing test"]


def test_a_backend_that_can_never_be_loaded_again_is_given_up(tmp_path: Path):
    """S-20: the report contains the error of the last process."""
    (tmp_path / "loads").write_text("")
    environment = {"LOADS": str(tmp_path / "loads")}
    report = report_of(tmp_path, "--backend", "ending:loads_only_once", *FEW, **environment)
    assert report["totals"]["unanswered"] > 0
    assert any("no device is left" in reason for reason in report["reasons_against"])


@pytest.mark.parametrize(
    ("backend", "how"),
    [
        ("exits_in_the_factory", "ended with status 0 while the backend was loaded"),
        ("hangs_in_the_factory", "took more than 3 s while the backend was loaded"),
        ("exits_when_imported", "ended with status 0 while the backend was loaded"),
    ],
)
def test_a_factory_that_ends_the_process_does_not_conform(backend: str, how: str, tmp_path: Path):
    """S-20: without a backend the run is not conformant, and an older report is replaced."""
    module = "ending_early:create" if backend == "exits_when_imported" else f"ending:{backend}"
    (tmp_path / "report.json").write_text('{"conformant": true}')
    report = report_of(tmp_path, "--backend", module, "--timeout", "3")
    assert report["status"] == 1
    assert not report["conformant"]
    assert report["verdict"].startswith(f"NOT CONFORMANT: {module}")
    assert any(how in reason for reason in report["reasons_against"]), report["reasons_against"]


def test_a_fork_of_the_process_sends_no_result(tmp_path: Path):
    """S-20: a fork that a backend makes and that returns takes no test and sends no result."""
    report = report_of(tmp_path, "--backend", "ending:forks", *FEW)
    assert report["status"] == 0
    assert [r["outcome"] for r in report["results"]] == ["passed"] * 4
    assert report["totals"]["unanswered"] == 0


def test_a_failure_of_the_last_test_does_not_stop_the_run(tmp_path: Path):
    """S-20: ``-x`` has no effect if no test is left after the failure."""
    report = report_of(tmp_path, "--backend", "ending:exits", "--only", NINE_HEADS, "-x")
    assert report["totals"]["unanswered"] == 0
    assert "stopped after" not in report["printed"]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_test_has_a_time_limit(workers: str, tmp_path: Path):
    """S-20: the report names the test and where it hung; its child is killed; others run."""
    started = tmp_path / "started"
    report = report_of(
        tmp_path,
        *("--backend", "ending:hangs", "--workers", workers, "--timeout", "8", *FEW),
        STARTED=str(started),
    )
    assert report["status"] == 1
    assert (report["totals"]["passed"], report["totals"]["timed-out"]) == (3, 1)
    hung = result_of(report, NINE_HEADS)
    assert hung["end"] == "timed-out"
    assert "no result after 8 s" in hung["message"]
    assert "ending.py" in hung["message"]
    assert hung["replay"].endswith(" --timeout 8")
    assert hung["replay"] in report["printed"]
    assert ended(int(started.read_text()))


def test_a_terminated_run_writes_its_report(tmp_path: Path):
    """S-20: no process is left, and the report states that the run was interrupted."""
    started, path = tmp_path / "started", tmp_path / "report.json"
    arguments = ("--backend", "ending:hangs", "--report", str(path), *FEW)
    run = start_suite(*arguments, STARTED=str(started))
    assert any(started.exists() or time.sleep(0.1) for _ in range(300))
    run.terminate()
    printed, _ = run.communicate(timeout=30)
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert last_line(printed).startswith("INTERRUPTED: ")
    assert "interrupted" in json.loads(path.read_text())["reasons_against"]
    assert ended(int(started.read_text()))


def ended(process: int) -> bool:
    """Return whether a process ends within 5 s."""
    for _ in range(50):
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            try:
                os.kill(process, 0)
            except ProcessLookupError:
                return True
            state = "R"
        if state == "Z":
            return True
        time.sleep(0.1)
    return False
