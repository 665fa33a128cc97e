"""The page with the results of the judged kernels."""

from __future__ import annotations

from collections.abc import Iterable

from ci.judged.manifest import Kernel, shown
from ci.judged.result import ENDED, NOT_CALLED, OUT_OF_TIME, Result
from ci.packages import ROOT

PAGE = ROOT / "conformance" / "docs" / "kernels-judged.md"
_HEAD = """\
# Kernels judged

This page has the results of [`paged-mla judge`](judge.md) for kernels of other projects. "Lines" is
the number of lines of Python that were written so that `judge` can call the kernel. "Run" and
"failed" are numbers of tests, "rules" are the [rules](../../reference/docs/rules.md) that failing
tests name, and "result" is the cause of most failures.

`python -m ci.judged page ci/judged/results.json` writes this page from the results of `python -m
ci.judged run` ([how](../../ci/README.md#kernels-of-other-projects)).

"""
_RULES = "../../reference/docs/rules.md"
_STATES = {
    OUT_OF_TIME: "The run exceeded its time limit.",
    ENDED: "The run ended before its verdict.",
    NOT_CALLED: "No call of the kernel returned an output.",
}
_CLEAN = "Every test that was run passed."
_NOT_YET = "The kernel was not judged yet."


def page(kernels: Iterable[Kernel], results: Iterable[Result]) -> str:
    """Return the page: a table with a line for each kernel, and the commands."""
    results, listed = list(results), list(kernels)
    found = {result.id: result for result in results}
    lines = [
        "| kernel | version | lines | GPU | run | failed | rules | result |",
        "|---|---|---|---|---|---|---|---|",
        *(_row(kernel, found.get(kernel.id)) for kernel in listed),
    ]
    commands = [
        "",
        "## How each kernel was called",
        "",
        "FOLDER contains the files of each source and is on Python's path.",
        "",
        "```",
        *(f"{shown(kernel)}  # {kernel.id}" for kernel in listed),
        "```",
    ]
    made = sorted(
        {f"{r.card}, torch {r.torch}, suite at commit {r.commit}" for r in results if r.card}
    )
    notes = ["", "## Where the kernels ran", "", *(f"- {place}" for place in made)]
    notes += ["", "## Replacements for code around kernels", ""]
    notes += [f"- {kernel.name}: {kernel.note}." for kernel in listed if kernel.note]
    return _HEAD + "\n".join([*lines, *commands, *notes]) + "\n"


def _row(kernel: Kernel, result: Result | None) -> str:
    about = [kernel.name, _version(kernel.source), str(kernel.lines)]
    if result is None:
        cells = [*about, "", "", "", "", _NOT_YET]
    else:
        rules = ", ".join(f"[{rule}]({_RULES}#{rule.lower()})" for rule in result.rules)
        said = " ".join(filter(None, (_STATES.get(result.outcome, ""), result.sentence)))
        numbers = [str(result.run), str(result.failed)] if result.card else ["", ""]
        cells = [*about, result.card, *numbers, rules, said or _CLEAN]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _version(source: str) -> str:
    """Return a source with the first seven digits of its commit."""
    project, at, commit = source.partition("@")
    return f"{project}@{commit[:7]}" if at else source
