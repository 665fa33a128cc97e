"""Triton's interpreter without work whose result nobody sees, which is half of what it does."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import getmembers
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def leave_out_unseen_work() -> None:
    """Spare interpreted programs what changes nothing in them."""
    leave_patched_parts_alone()
    check_overflow_where_reported()


def leave_patched_parts_alone() -> None:
    """Look through a part of the language only if its functions are not the interpreter's yet.

    A launch replaces them; each call of a function in a program looks through all of them again.
    """
    patch = interpreter._patch_builtin

    @cache
    def first_builtin(part: Any) -> str:  # all are replaced together, and restored together
        return next(name for name, member in getmembers(part) if is_builtin(member))

    def patch_once(part: Any, *rest: Any) -> None:
        if is_builtin(getattr(part, first_builtin(part))):
            patch(part, *rest)

    interpreter._patch_builtin = patch_once


def check_overflow_where_reported() -> None:
    """Let sums and products of integers be checked only where the check can fail a program.

    Each is computed again in 64 bits, and compared, for an assertion that only debugging turns on.
    """
    builder = interpreter.interpreter_builder
    checked = builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=checked)
