"""The user's function: where it lies, and what is called of it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from paged_mla_adapters.judge.module import module_of
from paged_mla_adapters.judge.solution import Solution
from paged_mla_shared.errors import InvalidArgument


def is_solution(target: str) -> bool:
    """Return whether a target is a solution of FlashInfer-Bench."""
    return target.endswith(".json")


@cache
def solution_of(target: str) -> Solution:
    """Return the solution of a file, which is read once.

    Raises
    ------
    InvalidArgument
        It is no solution that can be judged.
    """
    return Solution(Path(target))


def load(target: str) -> Callable[..., Any]:
    """Return what ``module:name`` or ``path/file.py:name`` names, or a file ``solution.json`` has.

    Parameters
    ----------
    target : str
        A name may have dots: ``module:Class.method``.

    Raises
    ------
    InvalidArgument
        The text has no such form, there is no such file or name, or it cannot be called. What the
        module itself raises passes through.
    """
    if is_solution(target):
        return solution_of(target).function()
    where, _, name = target.rpartition(":")
    if not where or not name:
        allowed = "MODULE:FUNCTION, FILE.py:FUNCTION or a solution, FILE.json"
        raise InvalidArgument("target", repr(target), allowed)
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidArgument("target", f"{where} without {name}", "a name that it has")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidArgument("target", f"a {type(found).__name__}", "a function or a class")
    made: Callable[..., Any] = found
    return made


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise InvalidArgument("target", where, "a file that is there")
    return module_of(f"paged_mla_judged_{path.stem}", path)


def calls_of(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return what is called, in order: a function, or the constructor, ``plan`` and ``run``.

    Raises
    ------
    InvalidArgument
        A class has no ``plan`` or no ``run``.
    """
    if not isinstance(target, type):
        return [target]
    methods = [getattr(target, name, None) for name in ("plan", "run")]
    if not all(map(callable, methods)):
        raise InvalidArgument("target", f"the class {target.__name__}", "one with plan and run")
    return [target, *filter(None, methods)]
