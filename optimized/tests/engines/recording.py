"""Records what our classes meet of an engine, from its sources; nothing of it is run."""

from __future__ import annotations

import ast
import copy
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any


def record(
    site: Path,
    version: str,
    *,
    classes: Mapping[str, Collection[str]],
    callers: Collection[str],
    called: Collection[str],
) -> dict[str, Any]:
    """Return the surface of the engine in a folder.

    Parameters
    ----------
    site : Path
    version : str
    classes : mapping
        Classes that ours extend or read, by module; functions of those modules that are `called`
        are recorded too.
    callers : collection
        Modules that call ours.
    called : collection
        Methods of ours, and functions that we call, whose arguments matter.
    """
    modules: dict[str, Any] = {}
    for module, wanted in classes.items():
        tree = parse(site, module)
        found = {
            node.name: _class(node)
            for node in tree.body
            if isinstance(node, ast.ClassDef) and node.name in wanted
        }
        functions = {
            node.name: parameters(node)
            for node in tree.body
            if isinstance(node, ast.FunctionDef) and node.name in called
        }
        modules[module] = {"classes": found, "functions": functions}
    calls: dict[str, list[str]] = {}
    for module in callers:
        for name, shape in _calls(parse(site, module), called):
            if shape not in calls.setdefault(name, []):
                calls[name].append(shape)
    return {"version": version, "modules": modules, "calls": dict(sorted(calls.items()))}


def parameters(function: ast.FunctionDef) -> str:
    """Return the parameters but self and cls, without types, "..." for every default."""
    given = copy.deepcopy(function.args)
    given.args = [arg for arg in given.args if arg.arg not in {"self", "cls"}]
    for arg in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
        if arg is not None:
            arg.annotation = None
    given.defaults = [ast.Constant(...) for _ in given.defaults]
    given.kw_defaults = [default and ast.Constant(...) for default in given.kw_defaults]
    return ast.unparse(given)


def assigned(node: ast.ClassDef) -> set[str]:
    """Return what methods of a class set on ``self``."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def fields(node: ast.ClassDef) -> list[str]:
    """Return what a class body declares or sets, in order."""
    found = []
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            found.append(line.target.id)
        elif isinstance(line, ast.Assign):
            found += [target.id for target in line.targets if isinstance(target, ast.Name)]
    return found


def methods(node: ast.ClassDef) -> dict[str, str]:
    """Return the parameters of each method of a class."""
    return {line.name: parameters(line) for line in node.body if isinstance(line, ast.FunctionDef)}


def _class(node: ast.ClassDef) -> dict[str, Any]:
    inner = [line for line in node.body if isinstance(line, ast.ClassDef)]
    return {
        "bases": ", ".join(ast.unparse(base).split("[")[0] for base in node.bases),
        "fields": ", ".join(fields(node)),
        "attributes": ", ".join(sorted(assigned(node))),
        "methods": methods(node),
        "classes": {one.name: _class(one) for one in inner},
    }


def _calls(tree: ast.Module, called: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the shape of each call, with "_" in place of each argument."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if isinstance(node.func, ast.Call) and ast.unparse(node.func).endswith("get_builder_cls()"):
            name = "builder_cls"
        if name in called:
            words = [f"{word.arg}=_" for word in node.keywords if word.arg is not None]
            yield name, ", ".join(["_"] * len(node.args) + words)


def parse(site: Path, module: str) -> ast.Module:
    """Return the source of a module in a folder."""
    return ast.parse((site / module.replace(".", "/")).with_suffix(".py").read_text())


def write(surfaces: Path, recorder: Callable[[Path, str], dict[str, Any]]) -> None:
    """Write one surface: the command line names the folder and the version."""
    site, version = Path(sys.argv[1]), sys.argv[2]
    surfaces.mkdir(exist_ok=True)
    text = json.dumps(recorder(site, version), indent=1)
    (surfaces / f"{version}.json").write_text(text + "\n")
