"""Kernels have no loop that Triton would compile to another, silently.

A name that begins as the value of another, and in each pass takes the value that the other had, is
not carried from pass to pass by Triton 3.6 and 3.7.1: it keeps the value that it began with.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paged_mla_optimized.kernels

ROOM = Path(paged_mla_optimized.kernels.__file__).parent
LOST = """
def kernel(first, n):
    slot = first
    before = slot
    for i in range(n):
        use(before)
        before = slot
        slot = slot + 1
"""


def copies(body: list[ast.stmt]) -> set[tuple[str, str]]:
    """Return names that are given another's value, and the others, in these statements alone."""
    return {
        (target.id, statement.value.id)
        for statement in body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def lost(source: str) -> list[str]:
    """Return what a loop of `source` would not carry."""
    found = []
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        loops = [node for node in ast.walk(function) if isinstance(node, ast.For | ast.While)]
        for outer in (function, *loops):
            begun = copies(outer.body)
            for loop in outer.body:
                if isinstance(loop, ast.For | ast.While):
                    again = begun & copies(loop.body)
                    found += [f"{function.name}: {a} = {b}" for a, b in sorted(again)]
    return found


def test_such_a_loop_is_found():
    assert lost(LOST) == ["kernel: before = slot"]


def test_the_value_before_may_be_computed():
    assert not lost(LOST.replace("before = slot\n    for", "before = first - 1\n    for"))


@pytest.mark.parametrize(
    "path", sorted(ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOM))
)
def test_no_kernel_has_one(path):
    assert not lost(path.read_text())
