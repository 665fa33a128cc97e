"""The matrix of groups and the mutants that they kill, as JSON and as Markdown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paged_mla_conformance.meta.mutants import MUTANTS
from paged_mla_conformance.meta.mutants.kill import Kills
from paged_mla_conformance.suite.selection.core import SUITE_GROUPS
from paged_mla_reference.faults import Fault
from paged_mla_reference.faults.reports import link
from paged_mla_shared.folders import make_folders


class Matrix:
    """The kills of a run of all mutants.

    Parameters
    ----------
    kills : sequence of Kills
        The kills of each mutant.
    right : Kills
        The failures of the right backend.
    """

    def __init__(self, kills: Sequence[Kills], right: Kills) -> None:
        self.kills = list(kills)
        self.right = right

    @property
    def faults(self) -> list[str]:
        """Defects of the suite, one sentence each; empty if it kills every mutant."""
        found = [f"{k.name} survives" for k in self.kills if not k.groups]
        found += [
            f"{k.name} fails tests, but no assertion of a rule that it breaks: {k.groups}"
            for k in self.kills
            if k.misjudged
        ]
        if self.right.groups:
            found.append(f"the right backend fails: {self.right.groups}")
        return found

    @property
    def seconds(self) -> float:
        """Processor time of all runs."""
        return self.right.seconds + sum(k.seconds for k in self.kills)

    @property
    def alone(self) -> dict[str, list[str]]:
        """For each group, the mutants that no other group kills."""
        found: dict[str, list[str]] = {group: [] for group in SUITE_GROUPS}
        for k in self.kills:
            if len(k.by()) == 1:
                found[k.by()[0]].append(k.name)
        return found

    def summary(self) -> str:
        """Return the totals in one line."""
        killed = sum(k.killed for k in self.kills)
        return (
            f"{killed} of {len(self.kills)} mutants killed by a rule they break, "
            f"{len(SUITE_GROUPS)} groups, {self.seconds:.0f} s of processor time"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the matrix as a JSON document."""
        return {
            "schema": 2,
            "groups": list(SUITE_GROUPS),
            "mutants": [
                {
                    "name": k.name,
                    "kind": MUTANTS[k.name].kind.value,
                    "fault": MUTANTS[k.name].fault_class.value,
                    "rules": list(MUTANTS[k.name].rules),
                    "citations": list(MUTANTS[k.name].citations),
                    "akin": list(MUTANTS[k.name].akin),
                    "what": MUTANTS[k.name].what,
                    "kills": k.groups,
                }
                for k in self.kills
            ],
        }

    def write(self, path: Path) -> None:
        """Write Markdown to `path`, and JSON next to it."""
        make_folders(path)
        path.write_text(self.markdown())
        path.with_suffix(".json").write_text(json.dumps(self.as_dict(), indent=1) + "\n")

    def summary_page(self) -> str:
        """Return a short page that explains mutants and counts the killed ones of each class."""
        return "\n".join([_HEAD, _BUILT, *self._faults()])

    def markdown(self) -> str:
        """Return the whole page."""
        return "\n".join([_HEAD, *self._faults(), *self._list(), *self._matrix(), *self._alone()])

    def _faults(self) -> list[str]:
        counts = Counter(MUTANTS[k.name].fault_class for k in self.kills)
        killed = Counter(MUTANTS[k.name].fault_class for k in self.kills if k.killed)
        lines = [f"| {fault} | {count} | {killed[fault]} |" for fault, count in counts.items()]
        total = f"| **all** | **{len(self.kills)}** | **{killed.total()}** |"
        head = ["## Faults", "", "| fault | mutants | killed |", "|---|---|---|"]
        return [*head, *lines, total, ""]

    def _list(self) -> list[str]:
        lines = [_line(k.name, MUTANTS[k.name]) for k in self.kills]
        head = ["| mutant | kind | class | rules | reports | what it does |", "|---" * 6 + "|"]
        return ["## Mutants", "", *head, *lines, ""]

    def _matrix(self) -> list[str]:
        groups = [g for g in SUITE_GROUPS if any(g in k.groups for k in self.kills)]
        lines = []
        for k in self.kills:
            cells = [_cell(k.groups.get(group, {})) for group in groups]
            lines.append(f"| {k.name} | {' | '.join(cells)} |")
        head = f"| mutant | {' | '.join(groups)} |"
        return [*_KEY, head, "|---" * (len(groups) + 1) + "|", *lines, ""]

    def _alone(self) -> list[str]:
        lines = [
            f"| {group} | {', '.join(names) or '(none)'} |" for group, names in self.alone.items()
        ]
        return [
            "## Mutants that only one group kills",
            "",
            "| group | mutants |",
            "|---|---|",
            *lines,
            "",
        ]


def _line(name: str, fault: Fault) -> str:
    cells = [
        f"`{name}`",
        fault.kind.value,
        fault.fault_class.value,
        ", ".join(fault.rules),
        _reports(fault),
        fault.what,
    ]
    return f"| {' | '.join(cells)} |"


def _reports(fault: Fault) -> str:
    known = [f"[{c}]({link(c)})" for c in fault.citations]
    known += [f"akin to [{c}]({link(c)})" for c in fault.akin]
    return ", ".join(known) or "no report known"


def _cell(kinds: dict[str, str]) -> str:
    if "rule" in kinds:
        return "x"
    if "other" in kinds:
        return "o"
    return "c" if kinds else ""


_HEAD = """\
# Mutants

This page shows which known faults the suite finds. A mutant is a backend with one known fault.
`nox -s mutants` runs the suite on each mutant. It fails if the suite does not find a mutant, if
only a crash shows it, or if no failing assertion names a rule that the mutant breaks. All mutants
run at small dims, those that break [S-22](../../reference/docs/rules.md#s-22) in bfloat16 and the
others in float32, because float32 does not round weights. Mutants that break
[S-11](../../reference/docs/rules.md#s-11) run in every cache format.

The faults are those of the
[catalogue](../../reference/src/paged_mla_reference/faults/__init__.py). A kernel mutant is the
reference with one changed function. A runner mutant wraps the runner of the reference. An engine
mutant is a right backend that runs the schedules of a wrong engine. This command runs one mutant:

    paged-mla conformance --backend paged_mla_conformance.meta.mutants.backends:lse-in-base-2

A mutant lists the rules that it breaks and other rules whose tests show its fault. Tests of
operations that a mutant does not change do not run on it, and neither do cases of production sizes.
"""

_BUILT = """\
`nox -s mutants` writes the whole list with its sources, and the matrix of groups and mutants, to
`out/mutants.md` and `out/mutants.json`.
"""

_KEY = [
    "## The groups that kill each mutant",
    "",
    "The name of a report is `project#number` (an issue or pull request), `project@commit` or",
    "`project@file`.",
    '"akin to" marks a report of a fault that is similar to the mutant.',
    "",
    "`x`: an assertion that names a rule which the mutant breaks; the group then ends.",
    "`o`: only assertions that name other rules. `c`: only crashes.",
    "",
]
