"""Make the next process find binaries on disk, independent of the order of its kernel launches.

Triton derives a binary's name from the source of its kernel, from that of the functions that the
kernel calls, and from all their constants. Before
https://github.com/triton-lang/triton/pull/10494, Triton left out the constants of functions that it
had not named before. Then a process could spend seconds on compiling a binary that was on disk
under a name from another order of kernels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

from triton.runtime.jit import JITCallable

from paged_mla_optimized.triton_compat.interpreter import is_interpreting

_lock = threading.RLock()
_settled: set[int] = set()  # ids of functions, which exist as long as their modules


def settle_key(kernel: Any) -> None:
    """Make Triton name all functions that a kernel calls before it names the kernel.

    Parameters
    ----------
    kernel : triton.JITFunction
    """
    if is_interpreting():
        return
    with _lock:
        if not isinstance(kernel, JITCallable) or id(kernel) in _settled:
            return
        _settled.add(id(kernel))
        for called in _called_by(kernel):
            settle_key(called)
        _ = kernel.cache_key


def _called_by(function: Any) -> Iterator[Any]:
    """Yield the objects that a function names, or the methods of a class that it names."""
    for name in _names(function.fn.__code__):
        value = function.fn.__globals__.get(name)
        yield from getattr(value, "hash_attrs", (value,))


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names in a function, including those in its comprehensions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
