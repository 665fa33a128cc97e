"""The list of kernels that are judged, with their sources and options."""

from __future__ import annotations

import ast
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ci.packages import ROOT
from paged_mla_shared.documents import read_toml
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.typed import build

MANIFEST = Path(__file__).with_name("kernels.toml")
WRAPPERS = Path(__file__).with_name("wrappers")
MOST_LINES = 10  # the most lines of a wrapper


@dataclass(frozen=True)
class Kernel:
    """One kernel that is judged.

    Parameters
    ----------
    id : str
        A short name, for files and options.
    name : str
        The name on the page.
    source : str
        ``package==version``, or ``owner/repository@commit``.
    target : str
        The target for ``paged-mla judge``: ``module:function``; a file of the payload,
        ``folder/file.py:function`` or ``folder/file.json``; or for a wrapper ``file.py:function``.
    options : tuple of str
        Options of ``paged-mla judge``.
    wrapped : bool
        Whether the target is a wrapper in :data:`WRAPPERS`.
    note : str
        A description of changes to the kernel, or of replacements for the code around it.
    """

    id: str
    name: str
    source: str
    target: str
    options: tuple[str, ...] = ()
    wrapped: bool = False
    note: str = ""

    def target_in(self, payload: Path) -> str:
        """Return the target; a file in it has its full path."""
        file = self.target.partition(":")[0]
        if self.wrapped:
            return str(WRAPPERS / self.target)
        return str(payload / self.target) if file.endswith((".py", ".json")) else self.target

    @property
    def lines(self) -> int:
        """The number of lines of the wrapper, without imports and docstrings; 0 without one."""
        if not self.wrapped:
            return 0
        return lines_of((WRAPPERS / self.target.partition(":")[0]).read_text())


def lines_of(source: str) -> int:
    """Return the number of lines of a source, without empty lines, imports and docstrings."""
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) for number, line in lines if number not in skipped)


def kernels(path: Path = MANIFEST) -> list[Kernel]:
    """Return the kernels of a manifest.

    Raises
    ------
    InvalidArgument
        The file cannot be read, two kernels have the same id, or a wrapper has too many lines.
    """
    document: dict[str, Any] = read_toml(path)
    found: list[Kernel] = [build(Kernel, entry, str(path)) for entry in document["kernel"]]
    seen: set[str] = set()
    for kernel in found:
        if kernel.id in seen:
            raise InvalidArgument(f"{path}: id", kernel.id, "one kernel for each id")
        if kernel.lines > MOST_LINES:
            allowed = f"at most {MOST_LINES} lines"
            raise InvalidArgument(f"{kernel.target}", f"{kernel.lines} lines", allowed)
        seen.add(kernel.id)
    return found


def chosen(only: str) -> list[Kernel]:
    """Return the kernels whose ids start with a word of ``--only``; "" returns all kernels.

    Raises
    ------
    InvalidArgument
        No id starts with a word.
    """
    found = kernels()
    words = [word for word in only.split(",") if word]
    for word in words:
        if not any(kernel.id.startswith(word) for kernel in found):
            ids = ", ".join(kernel.id for kernel in found)
            raise InvalidArgument("--only", word, f"the start of one of the ids {ids}")
    return [k for k in found if not words or k.id.startswith(tuple(words))]


def shown(kernel: Kernel) -> str:
    """Return the command that judges a kernel, for the root folder and the payload FOLDER."""
    target = kernel.target_in(Path("FOLDER")).replace(f"{ROOT}/", "")
    return shlex.join(["paged-mla", "judge", target, *kernel.options])
