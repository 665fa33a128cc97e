"""Errors of a device without enough memory, which are not failures of a kernel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from paged_mla_shared.errors import OutOfMemory


@contextmanager
def out_of_memory_is_no_answer() -> Iterator[None]:
    """Raise ``OutOfMemory`` instead of torch's error, and release torch's cached memory."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        raise OutOfMemory(str(error).partition("\n")[0]) from error
