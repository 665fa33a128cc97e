"""Triton's settings, which Triton calls knobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import triton


@contextmanager
def cache_in(folder: Path) -> Iterator[None]:
    """Make Triton store and find binaries in a folder, inside a with statement."""
    with triton.knobs.cache.scope():
        triton.knobs.cache.dir = str(folder)
        yield


def cuobjdump() -> str:
    """Return the path of the disassembler in Triton's wheel."""
    path: str = triton.knobs.nvidia.cuobjdump.path
    return path


def leave_out_source_lines() -> None:
    """Compile all later kernels without source lines."""
    triton.knobs.compilation.disable_line_info = True
