"""Kernels have no loop that Triton would compile to another, silently.

Two names begin as one value, and in each pass one takes the value that the other had. Triton 3.6
and 3.7.1 do not carry it from pass to pass: it keeps the value that both began with.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import paged_mla_optimized.kernels

ROOM = Path(paged_mla_optimized.kernels.__file__).parent
LOOP = """
def kernel(first, n):
    slot = first
    {before_loop}
    for i in {passes}(n):
        use(before)
        {again}
        slot = slot + 1
"""


def copies(*nodes: ast.AST) -> set[tuple[str, str]]:
    """Return names that are given another's value somewhere in these nodes, and the others."""
    return {
        (target.id, value.id)
        for node in nodes
        for statement in ast.walk(node)
        if isinstance(statement, ast.Assign)
        for target, value in assigned(statement)
        if isinstance(target, ast.Name) and isinstance(value, ast.Name)
    }


def assigned(statement: ast.Assign) -> list[tuple[ast.expr, ast.expr]]:
    """Return what is given which value, element by element."""
    [target], value = statement.targets, statement.value
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        return list(zip(target.elts, value.elts, strict=True))
    return [(target, value)]


def is_unrolled(loop: ast.For | ast.While) -> bool:
    """Return whether nothing is carried, since each pass is compiled by itself."""
    return isinstance(loop, ast.For) and "static_range" in ast.unparse(loop.iter)


def alike(pairs: set[tuple[str, str]]) -> list[set[str]]:
    """Return groups of names that copies lead to one another."""
    groups: list[set[str]] = []
    for pair in pairs:
        met = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in met] + [set(pair).union(*met)]
    return groups


def lost(source: str) -> set[str]:
    """Return what loops of `source` would not carry."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for loop in ast.walk(function):
            if not isinstance(loop, ast.For | ast.While) or is_unrolled(loop):
                continue
            inside = set(ast.walk(loop))
            outside = [node for node in ast.walk(function) if isinstance(node, ast.Assign)]
            before_loop = alike(copies(*(node for node in outside if node not in inside)))
            for a, b in copies(loop):
                if any({a, b} <= group for group in before_loop):
                    found.add(f"{function.name}: {a} = {b}")
    return found


@pytest.mark.parametrize("before_loop", ["before = slot", "before = first"])
@pytest.mark.parametrize(
    "again", ["before = slot", "before, slot = slot, slot + 1", "if i > 2: before = slot"]
)
def test_such_a_loop_is_found(before_loop, again):
    assert lost(LOOP.format(before_loop=before_loop, again=again, passes="range")) == {
        "kernel: before = slot"
    }


@pytest.mark.parametrize(
    ("before_loop", "passes"),
    [("before = first - 1", "range"), ("before = slot", "tl.static_range")],
)
def test_others_are_not(before_loop, passes):
    assert not lost(LOOP.format(before_loop=before_loop, again="before = slot", passes=passes))


@pytest.mark.parametrize(
    "path", sorted(ROOM.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOM))
)
def test_no_kernel_has_one(path):
    assert not lost(path.read_text())
