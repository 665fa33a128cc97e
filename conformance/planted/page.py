"""The table of a trial."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from planted.sets import SETS
from planted.torch_backend import TorchRunner
from planted.trial import Catch

HEAD = """# Planted bugs

A blind trial. The bugs, [a first set](../planted/bugs.py), [a second](../planted/bugs_again.py),
[a third](../planted/bugs_third.py), [a fourth](../planted/bugs_fourth.py) and
[a fifth](../planted/bugs_fifth.py), were written from the rules, without sight of any case, mutant
or vector, each set before it was put to the suite; their thresholds are drawn at random inside the
envelope that the first file names. The cases that
survivors of a set led to were added before the next one was asked: the earlier sets are blind to
them no longer. The [backend](../planted/torch_backend.py) that holds the bugs conforms. Each is put
to the suite in float32 up to the first failure, and what survives to the search ({minutes:g} min).

```
PYTHONPATH=conformance python -m planted --fuzz-minutes {minutes:g} \\
    --page conformance/docs/planted.md
```

{counts}
| set | bug | what it does | caught by | rule | seconds |
|---|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bug, and what noticed it."""

    name: str
    bug: type[TorchRunner]
    by_suite: Catch | None
    by_search: Catch | None

    @property
    def set(self) -> str:
        """The set it is from."""
        return next(name for name, bugs in SETS.items() if self.name in bugs)

    @property
    def line(self) -> str:
        """Its line of the table."""
        catch = self.by_suite or self.by_search
        if catch is None:
            found = ["**survives**", "", ""]
        else:
            by = f"`{catch.by}`" if self.by_suite else f"search: {catch.by}"
            found = [by, catch.rule, f"{catch.seconds:.0f}"]
        return "| " + " | ".join([self.set, f"`{self.name}`", self._what(), *found]) + " |"

    def _what(self) -> str:
        drawn = [f"{k} = {v}" for k, v in vars(self.bug).items() if isinstance(v, int)]
        told = [inspect.getdoc(self.bug) or "", *(f"`{d}`" for d in drawn)]
        return " ".join(told)


def page(findings: Sequence[Finding], minutes: float) -> str:
    """Return the page as Markdown."""
    counts = ""
    for name in SETS:
        asked = [finding for finding in findings if finding.set == name]
        counts += _count(name, asked) if asked else ""
    head = HEAD.format(minutes=minutes, counts=counts)
    return head + "".join(f"{finding.line}\n" for finding in findings)


def _count(name: str, findings: Sequence[Finding]) -> str:
    suite = sum(f.by_suite is not None for f in findings)
    search = sum(f.by_search is not None for f in findings)
    caught = f"the suite caught {suite}, the search {search}"
    survivors = len(findings) - suite - search
    return f"- Of {len(findings)} bugs of the {name} set {caught}; {survivors} survived.\n"
