"""Tests of the files that a release and other projects use."""

import os
import re
import subprocess
import textwrap

import pytest

from ci.packages import ROOT
from paged_mla_shared import __version__

ACTION = (ROOT / "action.yml").read_text()
[SCRIPT] = re.findall(r"^      run: \|\n((?: {8}.*\n)+)", ACTION, re.MULTILINE)
WORKFLOWS = [ACTION, *(p.read_text() for p in (ROOT / ".github/workflows").glob("*.yml"))]
COMMAND = """\
#!/bin/sh
printf '%s|' "$@"
printf '\\n```\\n\\033[1m# title\\n'
exit $STATUS
"""


@pytest.fixture(name="run")
def _run(tmp_path):
    """Run the script of the action with a command that prints its arguments."""
    command = tmp_path / "bin" / "paged-mla"
    command.parent.mkdir()
    command.write_text(COMMAND)
    command.chmod(0o755)
    summary = tmp_path / "summary.md"

    def run(status=0, **inputs):
        environment = {
            "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
            "RUNNER_TEMP": str(tmp_path),
            "GITHUB_STEP_SUMMARY": str(summary),
            "STATUS": str(status),
            "TARGET": "k.py:f",
            "COMMAND": "judge",
            "PROFILE": "",
            "ARGUMENTS": "",
            **inputs,
        }
        bash = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", textwrap.dedent(SCRIPT)]
        done = subprocess.run(
            bash, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done, summary.read_text() if summary.exists() else ""

    return run


def test_the_action_passes_its_inputs_as_single_arguments(run, tmp_path):
    done, _ = run(TARGET="a b;touch x", PROFILE="kernel,$(touch y)", ARGUMENTS="--quick *\n-k `z`")
    expected = [
        "judge",
        "a b;touch x",
        "--profile",
        "kernel,$(touch y)",
        "--quick",
        "*",
        "-k",
        "`z`",
    ]
    report = ["--report", f"{tmp_path}/paged-mla/report.json"]
    assert done.stdout.splitlines()[0].split("|")[:-1] == [*expected, *report]
    assert not {"x", "y"} & {path.name for path in tmp_path.iterdir()}


def test_the_action_tests_a_backend(run):
    done, _ = run(COMMAND="conformance", TARGET="m:create")
    assert done.stdout.startswith("conformance|--backend|m:create|--report|")


def test_the_action_ends_with_the_status_of_the_command_and_a_summary(run):
    done, summary = run(status=1)
    assert done.returncode == 1
    head, _, *printed = summary.splitlines()
    assert head == "### Verdict of paged-mla, exit status 1"
    assert [line[:4] for line in printed] == ["    "] * 3  # Markdown shows them as code
    assert "\033" not in summary


def test_the_action_rejects_other_commands(run):
    done, _ = run(COMMAND="explain")
    assert done.returncode == 2
    assert done.stderr == "command=explain is not supported; use judge or conformance\n"


def test_no_script_contains_an_expression():
    """An expression in a script would be a way to inject commands."""
    scripts = [text for w in WORKFLOWS for text in re.findall(r"run:((?:.*)(?:\n {8,}.*)*)", w)]
    assert scripts
    assert not [text for text in scripts if "${{" in text.split("\n      - ")[0]]


def test_actions_are_pinned_by_commit():
    uses = [line for text in WORKFLOWS for line in re.findall(r"uses: (.*)", text)]
    assert uses
    assert not [line for line in uses if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", line)]


def test_the_citation_has_the_version():
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
