"""The page about source mutation agrees with its plan and its results."""

from __future__ import annotations

import json
import tomllib

from running import ROOT

PLAN = tomllib.loads((ROOT / "ci" / "source_mutation.toml").read_text())
PAGE = ROOT / "conformance" / "docs" / "source-mutation.md"
RESULTS = json.loads(PAGE.with_suffix(".json").read_text())
EXCUSES = {
    (e["file"], e["was"], e["becomes"]): e["why"] for e in PLAN["excuse"] if e["file"] in RESULTS
}


def test_every_file_of_the_plan_was_tried():
    """The files of the plan exist, and the page lists those in which nothing was tried."""
    files = [f"{group['folder']}/{name}" for group in PLAN["group"] for name in group["files"]]
    assert all((ROOT / file).is_file() for file in files)
    assert list(RESULTS) == [file for file in files if file in RESULTS]
    assert all(result["tried"] for result in RESULTS.values())
    untried = "".join(f"* `{file}`\n" for file in files if file not in RESULTS)
    table, _ = PAGE.read_text().split("\n## Survivors\n")
    assert table.endswith(f"Not tried since they last changed:\n\n{untried}" if untried else "|\n")


def test_every_survivor_has_a_reason_and_every_reason_a_survivor():
    """A change that a test finds needs no reason."""
    survivors = {(f, *change) for f, result in RESULTS.items() for change in result["survivors"]}
    assert survivors == set(EXCUSES)


def test_every_reason_is_on_the_page():
    """The page has every reason of the plan."""
    page = PAGE.read_text()
    assert all(why in page for why in EXCUSES.values())
    assert all(f"| `{file}` | {result['made']} |" in page for file, result in RESULTS.items())
