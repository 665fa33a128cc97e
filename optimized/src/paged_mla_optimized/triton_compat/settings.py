"""Triton's settings, which it calls knobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import triton


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Have Triton keep binaries in a folder, and look for them there."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield


def cuobjdump() -> str:
    """Return the path of the tool that disassembles binaries, which Triton's wheel brings."""
    path: str = triton.knobs.nvidia.cuobjdump.path
    return path


def leave_out_source_lines() -> None:
    """Compile without source lines from now on."""
    triton.knobs.compilation.disable_line_info = True
