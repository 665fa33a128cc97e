"""Binaries on disk are found again by the next process, whichever kernel it launches first.

Triton names a binary after the source of its kernel, of what that calls, and the constants of all
of them. Until it was mended (https://github.com/triton-lang/triton/pull/10494), it left out the
constants of functions that it had not named before: a process then compiled for seconds what lay
on disk, under the name that another order of kernels had given it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

from triton.runtime.jit import JITCallable

from paged_mla_optimized.triton_compat.interpreter import is_interpreting

_lock = threading.RLock()
_settled: set[int] = set()  # ids of functions, which live as long as their modules


def settle_key(kernel: Any) -> None:
    """Have Triton name all that a kernel calls before the kernel; the interpreter names nothing.

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
    """Yield what a function names, and the methods of a class that it names."""
    for name in _names(function.fn.__code__):
        value = function.fn.__globals__.get(name)
        yield from getattr(value, "hash_attrs", (value,))


def _names(code: CodeType) -> Iterator[str]:
    """Yield names outside a function, those that its comprehensions use among them."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
