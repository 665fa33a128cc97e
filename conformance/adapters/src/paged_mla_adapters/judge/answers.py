"""Answers of a function: which tensors they are, and how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from paged_mla_adapters.judge.arguments import Arguments
from paged_mla_adapters.judge.claims import OUT_LAYOUTS
from paged_mla_adapters.judge.roles import ALIASES


def answers_of(result: Any, arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return out and lse out of what a function returned, and of the buffers that it got.

    Raises
    ------
    TypeError
        There is no output among them.
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
        raise TypeError(f"it returned a {type(result).__name__}; allowed: out, or out and lse")
    return found["out"], found.get("lse")


def layout_of(
    name: str,
    answer: torch.Tensor,
    sizes: tuple[int, int, int],
    inner: tuple[int, ...],
    preferred: str,
) -> str:
    """Return the layout that an answer's shape is one of.

    Parameters
    ----------
    name : str
    answer : Tensor
    sizes : (int, int, int)
        Tokens, heads and rows of the call.
    inner : tuple of int
        Sizes of each answer.
    preferred : str
        The layout to take where several have this shape.

    Raises
    ------
    TypeError
        None has it.
    """
    shapes = {layout: (*shape_of(layout, *sizes), *inner) for layout in OUT_LAYOUTS}
    for layout in (preferred, *OUT_LAYOUTS):
        if tuple(answer.shape) == shapes[layout]:
            return layout
    allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes.values()))
    raise TypeError(f"{name} has the shape {list(answer.shape)}; allowed: {allowed}")


def shape_of(layout: str, tokens: int, heads: int, rows: int) -> tuple[int, ...]:
    """Return the shape of answers in a layout, without the elements of each."""
    sizes = {"T": tokens, "H": heads, "B": rows, "Q": tokens // max(rows, 1)}
    return tuple(sizes[axis] for axis in layout.strip("[]").split(", "))


def by_token(answer: torch.Tensor, layout: str) -> torch.Tensor:
    """Return answers of a layout as [T, H, ...]."""
    if layout == "[H, T]":
        return answer.transpose(0, 1)
    if layout == "[B, H, Q]":
        answer = answer.transpose(1, 2)
    return answer if layout == "[T, H]" else answer.flatten(0, 1)
