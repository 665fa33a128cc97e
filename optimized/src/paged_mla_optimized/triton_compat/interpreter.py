"""Triton's interpreter: whether it is active, which versions are supported, and their fixes."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from paged_mla_shared.errors import Unsupported

_WHEN_IMPORTED = (not isinstance(tl.softmax, JITFunction), bool(triton.knobs.runtime.interpret))
"""Whether Triton's own functions, and those imported with this file, are interpreted."""


def is_interpreting() -> bool:
    """Return whether Triton was imported with ``TRITON_INTERPRET=1``."""
    return bool(triton.knobs.runtime.interpret)


@triton.constexpr_function  # type: ignore[untyped-decorator]
def is_compiled() -> bool:
    """Return, inside a kernel, whether it is compiled; the interpreter has no inline assembly."""
    return not triton.knobs.runtime.interpret


def check_interpreter() -> None:
    """Raise ``Unsupported`` if the interpreter is partly active or cannot run these kernels."""
    interprets = is_interpreting()
    if {interprets} != {*_WHEN_IMPORTED}:
        raise Unsupported(
            f"TRITON_INTERPRET={int(interprets)}, which has changed since Triton was imported; "
            "set it before Python starts, or before Triton is imported"
        )
    if interprets:
        _prepare_interpreter()


def _prepare_interpreter() -> None:
    """Reject versions whose interpreter cannot run these kernels, and fix Triton 3.9.

    With NumPy 2.4, the interpreter of Triton 3.6 cannot read loop bounds (triton#9171).
    """
    triton_release = _release(triton.__version__)
    if triton_release < (3, 7) and _release(np.__version__) >= (2, 4):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__} with NumPy {np.__version__} is not "
            "supported; use NumPy < 2.4, or Triton >= 3.7"
        )
    if triton_release >= (3, 10):
        raise Unsupported(
            f"the interpreter of Triton {triton.__version__} is not supported; "
            "use Triton 3.6 to 3.9"
        )
    if triton_release == (3, 9):
        keep_conditions()


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)


@cache
def keep_conditions() -> None:
    """Fix how the interpreter of Triton 3.9 broadcasts the condition of a scalar.

    The result of a scalar comparison has boolean values, but the type of the operands. Triton 3.9
    broadcasts it with that type to the shape of a tensor. A logical operation with a tensor's
    condition then returns integers, which loads and stores reject as a mask.
    """
    from triton.runtime.interpreter import (  # noqa: PLC0415 - not needed on a GPU
        InterpreterBuilder,
        TensorHandle,
    )

    spread = InterpreterBuilder.create_splat

    def spread_as_it_is(builder: InterpreterBuilder, to: Any, scalar: TensorHandle) -> TensorHandle:
        made = spread(builder, to, scalar)
        return TensorHandle(made.data.astype(scalar.data.dtype), made.dtype)

    InterpreterBuilder.create_splat = spread_as_it_is
