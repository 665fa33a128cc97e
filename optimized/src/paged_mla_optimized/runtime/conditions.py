"""Conditions in Triton's interpreter.

A scalar's comparison has the values of a condition and the type of what was compared. Beside a
tensor it is spread over its shape, by Triton 3.9 in that type: what comes of a tensor's condition
and a scalar's are integers then, which no load or store takes for a mask.
"""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def keep_conditions() -> None:
    """Have the interpreter spread a scalar's values as they are."""
    from triton.runtime.interpreter import (  # noqa: PLC0415 - a GPU needs no interpreter
        InterpreterBuilder,
        TensorHandle,
    )

    spread = InterpreterBuilder.create_splat

    def spread_as_it_is(builder: InterpreterBuilder, to: Any, scalar: TensorHandle) -> TensorHandle:
        made = spread(builder, to, scalar)
        return TensorHandle(made.data.astype(scalar.data.dtype), made.dtype)

    InterpreterBuilder.create_splat = spread_as_it_is
