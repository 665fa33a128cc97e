"""Launches of one kernel, without Triton's analysis of arguments that it has seen before.

Triton looks at every argument of every launch for the binary that fits, which costs more host
time than the launch. A :class:`Launcher` keeps the binary for each key its caller names.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch


class Launcher:
    """One kernel with the constants and options it is compiled for.

    Parameters
    ----------
    kernel : triton.JITFunction
        Its constants come after its arguments.
    constants : dict
    options : int
        Triton's, ``num_warps`` and ``num_stages``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int) -> None:
        self._kernel = kernel
        self._named = constants | options
        self._constants = tuple(constants[n] for n in kernel.arg_names if n in constants)
        self._binaries: dict[Hashable, Any] = {}

    def __call__(self, grid: tuple[int, int, int], key: Hashable | None, *arguments: Any) -> None:
        """Launch `grid` programs.

        `key` holds every number that Triton specialises on: strides of tensors that come from
        outside, all of them 16-byte aligned. ``None`` asks Triton to look for itself.
        """
        binary = None if key is None else self._binaries.get(key)
        if binary is not None:
            binary[grid](*arguments, *self._constants)
            return
        binary = self._kernel[grid](*arguments, **self._named)
        if key is not None:
            self._binaries[key] = binary  # the interpreter has none, and comes here again


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether every tensor starts at a multiple of 16 bytes, as fresh ones do."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0
