"""The table of a trial."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from planted.torch_backend import TorchRunner
from planted.trial import Catch

HEAD = """# Planted bugs

A blind trial. [The bugs](../planted/bugs.py) were written from the rules, without sight of any
case, mutant or vector; their thresholds are drawn at random inside the envelope that file names.
The [backend](../planted/torch_backend.py) they are planted in conforms. Each is put to the suite in
float32 up to the first failure, and what survives to {minutes:g} minutes of the search.

```
PYTHONPATH=conformance python -m planted --fuzz-minutes {minutes:g} \\
    --page conformance/docs/planted.md
```

Of {bugs} bugs the suite caught {suite}, the search {search}; {survivors} survived.

| bug | what it does | caught by | rule | seconds |
|---|---|---|---|---|
"""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One bug, and what noticed it."""

    name: str
    bug: type[TorchRunner]
    by_suite: Catch | None
    by_search: Catch | None

    @property
    def line(self) -> str:
        """Its line of the table."""
        catch = self.by_suite or self.by_search
        if catch is None:
            found = ["**survives**", "", ""]
        else:
            by = f"`{catch.by}`" if self.by_suite else f"search: {catch.by}"
            found = [by, catch.rule, f"{catch.seconds:.0f}"]
        return "| " + " | ".join([f"`{self.name}`", self._what(), *found]) + " |"

    def _what(self) -> str:
        drawn = [f"{k} = {v}" for k, v in vars(self.bug).items() if isinstance(v, int)]
        told = [inspect.getdoc(self.bug) or "", *(f"`{d}`" for d in drawn)]
        return " ".join(told)


def page(findings: Sequence[Finding], minutes: float) -> str:
    """Return the page as Markdown."""
    suite = sum(f.by_suite is not None for f in findings)
    search = sum(f.by_search is not None for f in findings)
    head = HEAD.format(
        minutes=minutes,
        bugs=len(findings),
        suite=suite,
        search=search,
        survivors=len(findings) - suite - search,
    )
    return head + "".join(f"{finding.line}\n" for finding in findings)
