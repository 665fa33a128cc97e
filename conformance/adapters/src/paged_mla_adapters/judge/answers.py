"""The outputs of a judged function: which tensors they are, and which layouts they have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paged_mla_adapters.judge.arguments import Arguments
from paged_mla_adapters.judge.claims import OUT_LAYOUTS
from paged_mla_adapters.judge.roles import ALIASES


def answers_of(result: Any, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return output and lse of a call, from its result and from the buffers that it received.

    Parameters
    ----------
    result : Any
        The function's result: a dict with known names, a sequence of output and lse, or the output.
        A tensor of the result takes precedence over a buffer.
    arguments : Arguments

    Returns
    -------
    out : Tensor
    lse : Tensor or None
        ``None`` if the function returns no lse.

    Raises
    ------
    TypeError
        Neither the result nor the buffers contain an output.
    """
    found: dict[str, torch.Tensor] = dict(arguments.passed)
    if isinstance(result, Mapping):
        named = ((role, name) for role in ("out", "lse") for name in ALIASES[role])
        found |= {role: result[name] for role, name in named if name in result}
    else:
        tensors = result if isinstance(result, tuple | list) else [result]
        returned = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
        found |= dict(zip(("out", "lse"), returned, strict=False))
    if "out" not in found:
        raise TypeError(
            f"the function returned a {type(result).__name__}; allowed: out, or out and lse"
        )
    return found["out"], found.get("lse")


def layout_of(
    name: str,
    answer: torch.Tensor,
    sizes: tuple[int, int, int],
    inner: tuple[int, ...],
    preferred: str,
) -> str:
    """Return the layout of an output, which follows from its shape.

    Parameters
    ----------
    name : str
        The name of the output in an error.
    answer : Tensor
        The output or the lse.
    sizes : (int, int, int)
        The numbers of tokens, heads and rows of the call.
    inner : tuple of int
        The sizes of the axes after those of the layout: (R,) for the output, () for the lse.
    preferred : str
        The layout to return if several layouts have this shape.

    Raises
    ------
    TypeError
        No layout has this shape.
    """
    shapes = {layout: (*shape_of(layout, *sizes), *inner) for layout in OUT_LAYOUTS}
    for layout in (preferred, *OUT_LAYOUTS):
        if tuple(answer.shape) == shapes[layout]:
            return layout
    allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes.values()))
    raise TypeError(f"{name} has the shape {list(answer.shape)}; allowed: {allowed}")


def shape_of(layout: str, tokens: int, heads: int, rows: int) -> tuple[int, ...]:
    """Return the sizes of the axes of a layout, which has no axis R."""
    sizes = {"T": tokens, "H": heads, "B": rows, "Q": tokens // max(rows, 1)}
    return tuple(sizes[axis] for axis in layout.strip("[]").split(", "))


def by_token(answer: torch.Tensor, layout: str) -> torch.Tensor:
    """Return a tensor of any layout as [T, H, ...]."""
    if layout == "[H, T]":
        return answer.transpose(0, 1)
    if layout == "[B, H, Q]":
        answer = answer.transpose(1, 2)
    return answer if layout == "[T, H]" else answer.flatten(0, 1)
