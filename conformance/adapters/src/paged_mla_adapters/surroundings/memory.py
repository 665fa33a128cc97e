"""A device without enough memory: no answer of a kernel, and no failure."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_shared.errors import OutOfMemory


@contextmanager
def out_of_memory_is_no_answer() -> Iterator[None]:
    """Raise ``OutOfMemory`` for torch's error, and give back what its allocator keeps."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(str(error).partition("\n")[0]) from error
