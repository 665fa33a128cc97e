"""Workloads in their own processes: the result of each, or the error that ended it."""

from __future__ import annotations

import time

import pytest

from paged_mla_optimized.engines.tools.apart import run_apart

SCENE = """
import json, pathlib, sys, time
_, name, _, folder, *options = sys.argv
if name != "ends silently":
    print("started")
if name == "succeeds":
    (pathlib.Path(folder) / f"{name}.json").write_text(json.dumps({"options": options}))
elif name == "falls":
    print("ImportError: no FA3")
    print("Received sigquit")
elif name == "sleeps":
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs one workload of a command that has five."""
    (tmp_path / "command.py").write_text(SCENE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(name, seconds=60):
        deadline = time.monotonic() + seconds
        return run_apart("command", name, tmp_path, ["--tokens", "3"], deadline)

    return run


def test_the_result_of_a_workload_is_read(run):
    assert run("succeeds") == {"options": ["--tokens", "3"]}


def test_the_result_of_an_earlier_run_is_not_read(run, tmp_path):
    (tmp_path / "falls.json").write_text("{}")
    assert "error" in run("falls")


@pytest.mark.parametrize(
    ("name", "error"),
    [("falls", "ImportError: no FA3"), ("ends", "started"), ("ends silently", "no output")],
    ids=["error", "no-error", "nothing"],
)
def test_the_last_error_in_a_log_is_the_reason_or_its_last_line(run, name, error):
    assert run(name) == {"error": error}


def test_a_workload_that_takes_too_long_is_stopped(run):
    assert run("sleeps", seconds=0) == {"error": "out of time"}
