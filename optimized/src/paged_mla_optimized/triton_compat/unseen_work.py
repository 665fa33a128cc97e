"""Remove the half of the work of Triton's interpreter that does not affect results."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from inspect import getmembers
from typing import Any

from triton.language.core import is_builtin
from triton.runtime import interpreter


@cache
def leave_out_unseen_work() -> None:
    """Remove interpreter work that does not affect the results of programs."""
    leave_patched_parts_alone()
    check_overflow_where_reported()


def leave_patched_parts_alone() -> None:
    """Patch a part of the language only if its functions are not the interpreter's already.

    A launch replaces these functions. Without this, each function call in a program searches all of
    them again.
    """
    patch = interpreter._patch_builtin

    @cache
    def first_builtin(part: Any) -> str:  # all functions are replaced and restored together
        return next(name for name, member in getmembers(part) if is_builtin(member))

    def patch_once(part: Any, *rest: Any) -> None:
        if is_builtin(getattr(part, first_builtin(part))):
            patch(part, *rest)

    interpreter._patch_builtin = patch_once


def check_overflow_where_reported() -> None:
    """Check sums and products of integers for overflow only if the check can fail a program.

    The check computes each result again in 64 bits, for an assertion that only debug mode enables.
    """
    builder = interpreter.interpreter_builder
    checked = builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=checked)
