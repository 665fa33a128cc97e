"""The user's function: how it is found, and which of its methods are called."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from paged_mla_adapters.judge.module import module_of
from paged_mla_adapters.judge.solution import Solution
from paged_mla_shared.errors import InvalidArgument


def is_solution(target: str) -> bool:
    """Return whether a target is a JSON file, which contains a solution of FlashInfer-Bench."""
    return target.endswith(".json")


def file_of(target: str) -> Path | None:
    """Return the file that a target names; ``None`` for a module."""
    file = target if is_solution(target) else target.rpartition(":")[0]
    return Path(file) if file.endswith((".json", ".py")) else None


@cache
def solution_of(target: str) -> Solution:
    """Return the solution of a file; each file is read once.

    Raises
    ------
    InvalidArgument
        The file does not contain a solution that ``judge`` supports.
    """
    return Solution(Path(target))


def load(target: str) -> Callable[..., Any]:
    """Return the function or class that a target names.

    Parameters
    ----------
    target : str
        ``module:name``, ``path/file.py:name``, or the path of a solution, ``file.json``. The name
        may have dots: ``module:Class.method``.

    Raises
    ------
    InvalidArgument
        The text has none of these forms, the file or the name does not exist, or the name is not
        that of a callable.
    ImportError
        The module does not exist. Other errors that the import of the module raises are passed on.
    RuntimeError
        FlashInfer-Bench cannot build the sources of a solution.
    """
    if is_solution(target):
        return solution_of(target).function()
    where, _, name = target.rpartition(":")
    if not where or not name:
        allowed = "MODULE:FUNCTION, FILE.py:FUNCTION, or FILE.json with a solution"
        raise InvalidArgument("target", repr(target), allowed)
    found: Any = _module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            raise InvalidArgument("target", f"{where} without {name}", "a name that exists there")
        found = getattr(found, part)
    if not callable(found):
        raise InvalidArgument("target", f"a {type(found).__name__}", "a function or a class")
    if inspect.iscoroutinefunction(found):
        raise InvalidArgument("target", f"the coroutine {name}", "a function without async")
    made: Callable[..., Any] = found
    return made


def _module(where: str) -> Any:
    if not where.endswith(".py"):
        return importlib.import_module(where)
    path = Path(where)
    name = f"paged_mla_judged_{path.stem}"
    if name not in sys.modules and not path.is_file():  # a function may change the folder
        raise InvalidArgument("target", where, "a file that exists")
    return module_of(name, path)


def calls_of(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return the functions to call, in order: a function, or a class, its ``plan`` and its ``run``.

    Raises
    ------
    InvalidArgument
        A class has no method ``plan`` or no method ``run``.
    """
    if not isinstance(target, type):
        return [target]
    methods = [getattr(target, name, None) for name in ("plan", "run")]
    if not all(map(callable, methods)):
        raise InvalidArgument(
            "target", f"the class {target.__name__}", "a class with the methods plan and run"
        )
    return [target, *filter(None, methods)]
