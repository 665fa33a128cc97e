"""Tests that the page of promises states the present versions, exit statuses and names."""

import json
import re
from pathlib import Path

import paged_mla.command
from paged_mla_adapters.judge import claims
from paged_mla_conformance.run import status
from paged_mla_conformance.run.reports.report import SCHEMA
from paged_mla_conformance.search import corpus
from paged_mla_reference.explain import explanation, joint_explanation
from paged_mla_reference.simulator import scenario, trace_file
from paged_mla_shared import dump, manifest, taps

PAGE = (Path(__file__).parents[1] / "shared/docs/promises.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table whose header row starts with the given cell."""
    [table] = re.findall(rf"^\| {header} \|.+\n\|[-|]+\|\n((?:\|.+\n)+)", PAGE, re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|\n").split(" | ")] for row in table.splitlines()]


def test_the_versions_of_formats_are_those_of_the_code():
    report = json.loads(SCHEMA.read_text())["properties"]["schema"]["const"]
    versions = {
        "report": report,
        "claims": claims.VERSION,
        "dump": ", ".join(dump.VERSIONS),
        "stored vectors": manifest.FORMAT,
        "taps": taps.VERSION,
        "scenario": scenario.VERSION,
        "trace": trace_file.VERSION,
        "replay": corpus.VERSION,
        "output": explanation.VERSION,
    }
    stated = {re.sub(r"[\[\]]", "", name): version for name, version, _ in rows("format")}
    assert len(stated) == len(versions)
    for name, version in versions.items():
        [found] = [text for start, text in stated.items() if start.startswith(name)]
        assert found == str(version)
    assert joint_explanation.VERSION == explanation.VERSION


def test_the_exit_statuses_are_those_of_the_command():
    stated = {int(number) for cells in rows("status") for number in cells[0].split(", ")}
    special = {status.INTERRUPTED, status.BROKEN_BACKEND, status.USAGE_ERROR}
    special |= {status.NO_TESTS_COLLECTED, paged_mla.command.INTERNAL_ERROR}
    help_text = paged_mla.command.usage().partition("Exit statuses:")[2]
    in_help = {int(n) for n in re.findall(r"^  (\d+)", help_text, re.MULTILINE)} | {141}
    assert special <= stated == in_help
