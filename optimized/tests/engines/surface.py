"""Recorded releases of engines, and questions about sources of ours that must fit them."""

from __future__ import annotations

import ast
import inspect
import json
from pathlib import Path


class Surface:
    """One recorded release."""

    def __init__(self, path: Path) -> None:
        found = json.loads(path.read_text())
        self.version = found["version"]
        self.modules, self.calls = found["modules"], found["calls"]
        self.names, self.runner = found.get("names", {}), found.get("runner", "")
        self.classes = {
            name: one for module in self.modules.values() for name, one in module["classes"].items()
        }

    def all_of(self, name: str, what: str) -> set[str]:
        """Return methods, fields or attributes of a class and of those it extends."""
        found: set[str] = set()
        if name in self.classes:
            one = self.classes[name][what]
            found |= set(one if isinstance(one, dict) else one.split(", "))
            for base in self.classes[name]["bases"].split(", "):
                found |= self.all_of(base, what)
        return found

    def method(self, name: str, method: str) -> str | None:
        """Return the parameters of a method of a class, or of the first that it extends."""
        if name not in self.classes:
            return None
        if method in self.classes[name]["methods"]:
            return self.classes[name]["methods"][method]
        bases = self.classes[name]["bases"].split(", ")
        return next(filter(None, (self.method(base, method) for base in bases)), None)


def _signature(parameters: str) -> inspect.Signature:
    return inspect.signature(eval(f"lambda {parameters}: 0"))


def accepts(parameters: str, call: str) -> None:
    """Bind a recorded call, "_" for every value."""
    node = ast.parse(f"f({call})", mode="eval").body
    _signature(parameters).bind(*[0] * len(node.args), **{word.arg: 0 for word in node.keywords})


def bases(node: ast.ClassDef) -> list[str]:
    return [ast.unparse(base).split("[")[0] for base in node.bases]


def calls_of_super(node: ast.ClassDef) -> list[tuple[str, str]]:
    """Return the method and the arguments of each ``super().method(...)``."""
    found = []
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super()."):
            words = [f"{w.arg}=0" for w in call.keywords if w.arg]
            assert isinstance(call.func, ast.Attribute)
            found.append((call.func.attr, ", ".join(["0"] * len(call.args) + words)))
    return found
