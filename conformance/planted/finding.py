"""A line of the table of a trial."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from planted.sets import SETS
from planted.torch_backend import TorchRunner
from planted.trial import Catch


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
