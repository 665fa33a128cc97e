"""Triton's interpreter: whether it runs, which versions can run these kernels, and their mends."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from paged_mla_shared.errors import Unsupported

_WHEN_IMPORTED = (not isinstance(tl.softmax, JITFunction), bool(triton.knobs.runtime.interpret))
"""Whether Triton's own functions are the interpreter's, and those imported with this file."""


def is_interpreting() -> bool:
    """Return whether Triton was imported with ``TRITON_INTERPRET=1``."""
    return bool(triton.knobs.runtime.interpret)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def is_compiled() -> bool:
    """Return, inside a kernel, whether no interpreter runs it, which knows no assembly."""
    return not triton.knobs.runtime.interpret


def check_interpreter() -> None:
    """Raise ``Unsupported`` where the interpreter is half there, or cannot run these kernels."""
    interprets = is_interpreting()
    if {interprets} != {*_WHEN_IMPORTED}:
        raise Unsupported(
            f"TRITON_INTERPRET={int(interprets)}, which has changed since Triton was imported: "
            "set it where Python is started, or before anything imports Triton"
        )
    if interprets:
        _prepare_interpreter()


def _prepare_interpreter() -> None:
    """Refuse versions whose interpreter cannot run these kernels, and mend that of Triton 3.9.

    With NumPy 2.4, that of Triton 3.6 reads no bound of a loop (triton#9171).
    """
    triton_release = _release(triton.__version__)
    if triton_release < (3, 7) and _release(np.__version__) >= (2, 4):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__} with NumPy {np.__version__}: "
            "allowed: NumPy < 2.4, or Triton >= 3.7"
        )
    if triton_release >= (3, 10):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__}: allowed: that of Triton 3.6 to 3.9"
        )
    if triton_release == (3, 9):
        keep_conditions()


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@cache
def keep_conditions() -> None:
    """Have the interpreter of Triton 3.9 spread a scalar's condition as it is.

    A scalar's comparison has the values of a condition and the type of what was compared. Triton
    3.9 spreads it in that type over the shape of a tensor beside it: the result of a tensor's
    condition and a scalar's is integers then, which no load or store takes for a mask.
    """
    from triton.runtime.interpreter import (  # noqa: PLC0415 - a GPU needs no interpreter
        InterpreterBuilder,
        TensorHandle,
    )

    spread = InterpreterBuilder.create_splat

    def spread_as_it_is(builder: InterpreterBuilder, to: Any, scalar: TensorHandle) -> TensorHandle:
        made = spread(builder, to, scalar)
        return TensorHandle(made.data.astype(scalar.data.dtype), made.dtype)

    InterpreterBuilder.create_splat = spread_as_it_is
