"""Solutions of FlashInfer-Bench: JSON files with the sources of a kernel and its entry point.

This module imports sources in Python. FlashInfer-Bench builds sources in other languages, if it is
installed.

The arguments of a solution follow from the name of its definition, for example
``mla_paged_decode_h16_ckv512_kpe64_ps64``. Source: ``flashinfer_bench/data/solution.py`` of
flashinfer-ai/flashinfer-bench at 40e6ca78.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from paged_mla_adapters.flashinfer_bench.builder import build, check_installed
from paged_mla_adapters.flashinfer_bench.definition import Definition
from paged_mla_adapters.judge.claims import Served
from paged_mla_adapters.judge.module import module_of
from paged_mla_shared import typed
from paged_mla_shared.documents import read_text
from paged_mla_shared.errors import InvalidArgument

_LARGEST = 64 << 20  # the most bytes of a file
_IMPORTED = ("python", "triton")
_BUILT = ("cuda", "cpp", "tilelang")


class Solution:
    """A solution of a paged MLA definition.

    Parameters
    ----------
    path : Path
        The JSON file.

    Raises
    ------
    InvalidArgument
        The file cannot be read, is not a solution of a paged MLA definition, or has an unknown
        language; or the language needs FlashInfer-Bench, and FlashInfer-Bench is not installed.
    """

    def __init__(self, path: Path) -> None:
        text = read_text(path, _LARGEST)
        try:
            self._document = json.loads(text)
            spec = self._document["spec"]
            name = str(self._document["definition"])
            self._entry, self._function = spec["entry_point"].split("::")
            self._passes_outputs = spec.get("destination_passing_style")
            sources = [(s["path"], s["content"]) for s in self._document["sources"]]
            self._language = spec["language"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise InvalidArgument(str(path), said, "a solution of FlashInfer-Bench") from error
        self._definition = Definition.of(f"{path}: definition", name)
        self._sources: dict[str, str] = {
            typed.build(str, source, f"{path}: sources[{number}].path"): typed.build(
                str, content, f"{path}: sources[{number}].content"
            )
            for number, (source, content) in enumerate(sources)
        }
        if self._language not in (*_IMPORTED, *_BUILT):
            allowed = ", ".join((*_IMPORTED, *_BUILT))
            raise InvalidArgument(f"{path}: language", self._language, allowed)
        if self._entry not in self._sources:
            raise InvalidArgument(f"{path}: entry_point", self._entry, "the path of a source")
        if self._language in _BUILT:
            check_installed(f"{path}: language", self._language)
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def served(self) -> Served:
        """The values that the definition requires a solution to support."""
        of = self._definition
        return Served(
            dtypes=("bfloat16",),
            cache_formats=("bf16",),
            num_heads=(of.num_heads,),
            block_sizes=(of.page_size,),
            head_dims=((of.rank, of.rope),),
            max_query_len=1 << 20 if of.is_prefill else 1,
            mixed=of.is_prefill,
            strided_cache=False,
        )

    def parameters(self, entry: Callable[..., Any]) -> list[str]:
        """Return the names of the arguments of the entry point, in order.

        Older solutions do not declare whether outputs are passed as arguments. Outputs are then
        passed if the entry point accepts enough arguments.
        """
        names, outputs = self._definition.inputs, self._definition.outputs
        passes = self._passes_outputs
        if passes is None:
            passes = _takes(entry, len(names) + len(outputs))
        return [*names, *outputs] if passes else [*names]

    def function(self) -> Callable[..., Any]:
        """Return a function that calls the entry point and takes its arguments by name.

        Raises
        ------
        InvalidArgument
            The path of a source is outside the solution's folder, or the source has no function
            with the name of the entry point.
        RuntimeError
            FlashInfer-Bench cannot build the sources.
        """
        if self._language in _BUILT:
            built = build(self._definition, self._document)
            return _named(built, self.parameters(built))
        name = f"paged_mla_solution_{self._digest}"
        entry = module_of(name, self._folder / self._entry)
        found = getattr(entry, self._function, None)
        if not callable(found):
            raise InvalidArgument("entry_point", self._function, "a function in its source file")
        return _named(found, self.parameters(found))

    @cached_property
    def _folder(self) -> Path:
        """A folder with the sources, which only this user can write; it is deleted at exit."""
        for path in self._sources:
            parts = PurePosixPath(path)
            if parts.is_absolute() or ".." in parts.parts:
                raise InvalidArgument("sources", path, "a path inside the solution's folder")
        folder = Path(tempfile.mkdtemp(prefix="paged_mla_solution_"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for path, content in self._sources.items():
            file = folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content)
        sys.path.insert(0, str(folder))  # sources import each other by their paths in this folder
        return folder


def _takes(function: Callable[..., Any], number: int) -> bool:
    """Return whether a function can be called with this number of positional arguments."""
    try:
        inspect.signature(function).bind(*range(number))
    except TypeError:
        return False
    return True


def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a function that takes arguments by name and passes them in the order of `names`."""

    def call(**given: Any) -> Any:
        return function(*(given[name] for name in names))

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
