"""Tests of ``ci.judged``: the manifest, the runner and the page."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from ci.judged import manifest
from ci.judged import run as runner
from ci.judged.__main__ import main
from ci.judged.manifest import Kernel, chosen, kernels, shown
from ci.judged.page import PAGE, page
from ci.judged.result import Result, read_all, result_of, sentence_of, write_all
from ci.packages import ROOT
from paged_mla_shared.errors import InvalidArgument

RESULTS = ROOT / "ci" / "judged" / "results.json"
KERNEL = Kernel("k", "A kernel", "owner/name@0123456789", "k.py:attend", ("--scale", "0.5"))
REPORT = {
    "backend": {"device": "A card"},
    "environment": {"torch": "2.11.0"},
    "totals": {"run": 30, "failed": 3, "skipped": 4},
    "causes": [
        {
            "rule": "S-5",
            "what": "out",
            "kind": "NaN",
            "count": 2,
            "error": "nan",
            "sentence": "S-5, out: NaN in 2 tests.",
        },
        {"rule": "S-10", "kind": "changed bytes", "count": 1, "error": "", "sentence": "S-10"},
    ],
}


def test_the_page_shows_the_committed_results():
    assert PAGE.read_text() == page(kernels(), read_all(RESULTS))


def test_wrappers_are_short_and_commands_are_shown():
    listed = kernels()
    assert all(kernel.lines <= manifest.MOST_LINES for kernel in listed)
    [system] = chosen("fastdeploy-system")
    assert system.lines == 4
    assert manifest.lines_of('"""A text."""\n\nimport os\n\n\ndef f():\n    return os\n') == 2
    where = "paged-mla judge ci/judged/wrappers/fastdeploy_system.py:attend"
    assert shown(system).startswith(where)
    assert shown(KERNEL) == "paged-mla judge FOLDER/k.py:attend --scale 0.5"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[kernel]]\nid = "a"\nname = "A"\nsource = "s"\ntarget = "t:f"\n' * 2, "one kernel"),
        ('[[kernel]]\nid = "a"\n', "name"),
    ],
)
def test_a_wrong_manifest(text: str, message: str, tmp_path: Path):
    path = tmp_path / "kernels.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        kernels(path)


def test_kernels_are_chosen_by_the_start_of_their_ids():
    assert {kernel.id for kernel in chosen("fib-,chitu")} >= {"chitu-decode", "fib-o3-decode"}
    assert chosen("") == kernels()
    with pytest.raises(InvalidArgument, match="--only: got nothing"):
        chosen("nothing")


def test_a_result_has_the_sentence_of_the_first_cause():
    """The rules are those of every cause, in the order of their numbers."""
    found = result_of(KERNEL, 1, REPORT, "", 2.0)
    assert found == Result(
        id="k",
        outcome="failed",
        seconds=2.0,
        card="A card",
        torch="2.11.0",
        run=30,
        failed=3,
        not_asked=4,
        rules=("S-5", "S-10"),
        sentence="S-5, out: NaN in 2 tests.",
    )


@pytest.mark.parametrize(
    ("status", "outcome"), [(None, "out of time"), (-11, "ended"), (2, "not called")]
)
def test_a_process_without_a_report(status: int | None, outcome: str):
    found = result_of(KERNEL, status, None, "first\nlast \n\n", 2.0)
    assert (found.outcome, found.sentence, found.run) == (outcome, "last", 0)


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        ({"rule": "S-10", "what": "append", "kind": "N bytes written before"}, "S-10: memory"),
        ({"kind": "exception AcceleratorError: CUDA error: an illegal"}, "S-9: a call ends"),
        ({"rule": "S-7", "what": "lse", "kind": "NaN"}, "as it is"),
    ],
)
def test_damaged_memory_is_reported_without_details(cause: dict[str, str], said: str):
    given = {"count": 1, "error": "at byte -192", "sentence": "as it is"} | cause
    assert sentence_of(given).startswith(said)
    assert "192" not in sentence_of(given)


def test_results_are_read_as_they_were_written(tmp_path: Path):
    path = tmp_path / "results.json"
    found = [result_of(KERNEL, 1, REPORT, "", 2.0), Result("a", "out of time", 540.0)]
    write_all(found, path)
    assert read_all(path) == [found[1], found[0]]
    path.write_text("{")
    with pytest.raises(InvalidArgument, match="a file that"):
        read_all(path)


def test_rows_of_the_page():
    failed, other = result_of(KERNEL, 1, REPORT, "", 2.0), dataclasses.replace(KERNEL, id="other")
    text = page([KERNEL, other], [failed])
    rules = ", ".join(f"[S-{n}](../../reference/docs/rules.md#s-{n})" for n in (5, 10))
    assert f"| A kernel | owner/name@0123456 | 0 | A card | 30 | 3 | {rules} | S-5, out:" in text
    assert "The kernel was not judged yet." in text


def test_kernels_that_crash_or_hang_do_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Each kernel has its own process, which ends with its children at the time limit."""
    programs = {
        "ends": "import os; os.abort()",
        "hangs": "print('started', flush=True); import time; time.sleep(600)",
        "works": "import sys, pathlib, json; a = sys.argv; "
        f"pathlib.Path(a[a.index('--report') + 1]).write_text({json.dumps(json.dumps(REPORT))})",
    }
    for name, program in programs.items():
        (tmp_path / f"{name}.py").write_text(program)

    class Python:
        """An interpreter that runs the kernel's file instead of ``judge``."""

        executable = str(tmp_path / "python")

    script = '#!/bin/sh\nwhile [ "$1" != judge ]; do shift; done; shift\n'
    Path(Python.executable).write_text(f'{script}exec {sys.executable} "$@"\n')
    Path(Python.executable).chmod(0o755)
    monkeypatch.setattr(runner, "sys", Python)
    listed = [Kernel(name, name, "s", f"{name}.py") for name in programs]
    runner.run(listed, tmp_path, tmp_path / "out", [], jobs=3, seconds=5)
    outcomes = {r.id: (r.outcome, r.run) for r in read_all(tmp_path / "out" / "results.json")}
    assert outcomes == {"ends": ("ended", 0), "hangs": ("out of time", 0), "works": ("passed", 30)}


def test_no_kernel_starts_after_the_total_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert runner.run([KERNEL], tmp_path, tmp_path, [], jobs=1, seconds=5, total=0) == []
    assert "k: not started" in capsys.readouterr().out


def test_a_wrong_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run", "--payload", str(tmp_path / "no"), "--out", str(tmp_path)]) == 2
    assert "--payload: got" in capsys.readouterr().err
    assert main(["page", str(tmp_path / "no.json")]) == 2
    assert "allowed: a file that `run` wrote" in capsys.readouterr().err
