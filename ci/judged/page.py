"""The page of the kernels that were judged."""

from __future__ import annotations

from collections.abc import Iterable

from ci.judged.manifest import Kernel, shown
from ci.judged.result import ENDED, NOT_CALLED, OUT_OF_TIME, Result
from ci.packages import ROOT

PAGE = ROOT / "conformance" / "docs" / "kernels-judged.md"
_HEAD = """\
# Kernels judged

What [`paged-mla judge`](judge.md) found of kernels of other projects, by the names of their
parameters or as a known signature. The suite asks each kernel what
`judge` found that it serves. "Lines" counts the Python that was written so that `judge` can call
the kernel. "Run" and "failed" count tests. [The reference](../../reference/README.md) states the
rules. This page was written by
`python -m ci.judged page ci/judged/results.json`, from what `python -m ci.judged run` wrote
([how](../../ci/README.md#kernels-of-other-projects)).

"""
_STATES = {
    OUT_OF_TIME: "Time was out before the run ended.",
    ENDED: "The run ended before its verdict.",
    NOT_CALLED: "No call of it returned an answer.",
}
_CLEAN = "Every test that was asked passed."
_NOT_YET = "It was not judged yet."


def page(kernels: Iterable[Kernel], results: Iterable[Result]) -> str:
    """Return the page, a line of a table for each kernel and its command below."""
    results, listed = list(results), list(kernels)
    found = {result.id: result for result in results}
    lines = [
        "| kernel | version | lines | card | run | failed | rules | what was found |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(kernel, found.get(kernel.id)) for kernel in listed),
    ]
    commands = [
        "",
        "## How each was called",
        "",
        "FOLDER holds the files of each source, and is on Python's path.",
        "",
        "```",
        *(f"{shown(kernel)}  # {kernel.id}" for kernel in listed),
        "```",
    ]
    made = sorted({f"{r.card}, torch {r.torch}, suite of {r.commit}" for r in results if r.card})
    notes = ["", "## Where they ran", "", *(f"- {place}" for place in made)]
    notes += ["", "## What stands in for what is around them", ""]
    notes += [f"- {kernel.name}: {kernel.note}." for kernel in listed if kernel.note]
    return _HEAD + "\n".join([*lines, *commands, *notes]) + "\n"


def _row(kernel: Kernel, result: Result | None) -> str:
    about = [kernel.name, _version(kernel.source), str(kernel.lines)]
    if result is None:
        cells = [*about, "", "", "", "", _NOT_YET]
    else:
        said = " ".join(filter(None, (_STATES.get(result.outcome, ""), result.sentence)))
        numbers = [str(result.run), str(result.failed)] if result.card else ["", ""]
        cells = [*about, result.card, *numbers, ", ".join(result.rules), said or _CLEAN]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _version(source: str) -> str:
    """Return a source with the first digits of its commit."""
    project, at, commit = source.partition("@")
    return f"{project}@{commit[:7]}" if at else source
