"""Solutions of FlashInfer-Bench: a JSON file with the sources of a kernel and their entry point.

What a solution is given follows from its definition's name, for example
``mla_paged_decode_h16_ckv512_kpe64_ps64``. Sources: ``flashinfer_bench/data/solution.py`` at
40e6ca78, and the definitions in ``flashinfer_trace/definitions/mla_paged`` at 424f2221.
"""

from __future__ import annotations

import atexit
import hashlib
import inspect
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from paged_mla_adapters.judge.claims import Served
from paged_mla_adapters.judge.module import module_of
from paged_mla_shared.documents import read_text
from paged_mla_shared.errors import InvalidArgument

_LARGEST = 64 << 20  # bytes of a file
_NAME = re.compile(r"mla_paged_(decode|prefill_causal)_h(\d+)_ckv(\d+)_kpe(\d+)_ps(\d+)")
_LANGUAGES = ("python", "triton")


class Solution:
    """A solution, whose sources are Python.

    Parameters
    ----------
    path : Path

    Raises
    ------
    InvalidArgument
        The file cannot be read, is no solution of a paged MLA definition, or its sources are not
        Python.
    """

    def __init__(self, path: Path) -> None:
        text = read_text(path, _LARGEST)
        try:
            document = json.loads(text)
            spec = document["spec"]
            self._definition = str(document["definition"])
            self._entry, self._function = spec["entry_point"].split("::")
            self._passes_outputs = spec.get("destination_passing_style", True)
            self._sources = {s["path"]: s["content"] for s in document["sources"]}
            language = spec["language"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            said = f"{type(error).__name__}: {error}"
            raise InvalidArgument(str(path), said, "a solution of FlashInfer-Bench") from error
        found = _NAME.fullmatch(self._definition)
        if found is None:
            allowed = "mla_paged_decode_h*_ckv*_kpe*_ps*, and mla_paged_prefill_causal_* likewise"
            raise InvalidArgument(f"{path}: definition", self._definition, allowed)
        if language not in _LANGUAGES:
            raise InvalidArgument(f"{path}: language", language, " or ".join(_LANGUAGES))
        if self._entry not in self._sources:
            raise InvalidArgument(f"{path}: entry_point", self._entry, "one of its sources")
        self._is_prefill = found[1] == "prefill_causal"
        self._constants = [int(found[group]) for group in range(2, 6)]
        self._digest = hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def served(self) -> Served:
        """What the definition promises, which the solution is held to."""
        heads, rank, rope, page_size = self._constants
        return Served(
            dtypes=("bfloat16",),
            cache_formats=("bf16",),
            num_heads=(heads,),
            block_sizes=(page_size,),
            head_dims=((rank, rope),),
            max_query_len=1 << 20 if self._is_prefill else 1,
            mixed=self._is_prefill,
            strided_cache=False,
        )

    @property
    def parameters(self) -> list[str]:
        """Names of what the entry point is given, in order."""
        names = ["q_nope", "q_pe", "ckv_cache", "kpe_cache"]
        names += ["qo_indptr"] if self._is_prefill else []
        names += ["kv_indptr", "kv_indices"]
        names += ["kv_last_page_len"] if self._constants[-1] > 1 else []
        return [*names, "sm_scale", *(["output", "lse"] if self._passes_outputs else [])]

    def function(self) -> Callable[..., Any]:
        """Return the entry point, with parameters that have names.

        Raises
        ------
        InvalidArgument
            A source lies outside the solution's folder, or the entry point is not there.
        """
        name = f"paged_mla_solution_{self._digest}"
        entry = module_of(name, self._folder / self._entry)
        found = getattr(entry, self._function, None)
        if not callable(found):
            raise InvalidArgument("entry_point", self._function, "a function of its source")
        return _named(found, self.parameters)

    @cached_property
    def _folder(self) -> Path:
        """A folder with the sources, which no other user may write; it ends with the process."""
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
        sys.path.insert(0, str(folder))  # sources import each other by their paths in it
        return folder


def _named(function: Callable[..., Any], names: list[str]) -> Callable[..., Any]:
    """Return a function that passes what it is given by name in order, as solutions are called."""

    def call(**given: Any) -> Any:
        return function(*(given[name] for name in names))

    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind) for name in names]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call
