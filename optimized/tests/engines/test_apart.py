"""Scenes in processes of their own: what they found, or what ended them."""

from __future__ import annotations

import time

import pytest

from paged_mla_optimized.engines.tools.apart import run_apart

SCENE = """
import json, pathlib, sys, time
_, name, _, folder, *options = sys.argv
if name != "ends silently":
    print("begun")
if name == "answers":
    (pathlib.Path(folder) / f"{name}.json").write_text(json.dumps({"options": options}))
elif name == "falls":
    print("ImportError: no FA3")
    print("Received sigquit")
elif name == "sleeps":
    time.sleep(60)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run a scene of that name, of a command that knows five."""
    (tmp_path / "command.py").write_text(SCENE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(name, seconds=60):
        deadline = time.monotonic() + seconds
        return run_apart("command", name, tmp_path, ["--tokens", "3"], deadline)

    return run


def test_what_a_scene_wrote_is_found(run):
    assert run("answers") == {"options": ["--tokens", "3"]}


def test_what_an_earlier_run_wrote_is_not(run, tmp_path):
    (tmp_path / "falls.json").write_text("{}")
    assert "error" in run("falls")


@pytest.mark.parametrize(
    ("name", "error"),
    [("falls", "ImportError: no FA3"), ("ends", "begun"), ("ends silently", "silence")],
    ids=["error", "no-error", "nothing"],
)
def test_the_last_error_in_a_log_is_the_reason_or_its_last_line(run, name, error):
    assert run(name) == {"error": error}


def test_a_scene_that_takes_too_long_is_ended(run):
    assert run("sleeps", seconds=0) == {"error": "out of time"}
