"""Launches of one kernel, without Triton's analysis of arguments that it has seen before.

Triton looks at every argument of every launch for the binary that fits, which costs more host
time than the launch. A :class:`Launcher` keeps the binary for each key its caller names, and
starts it by addresses and numbers alone. Profilers that hook into Triton's launches still see
each of them.
"""

from __future__ import annotations

from collections.abc import Hashable
from itertools import takewhile
from typing import Any

import torch
import triton
from triton.runtime.driver import driver

_HOOKS = triton.knobs.runtime


class Launcher:
    """One kernel with the constants and options it is compiled for, on one device.

    Parameters
    ----------
    kernel : triton.JITFunction
        Takes pointers first, then numbers, then constants.
    constants : dict
    options : int
        Triton's, such as ``num_warps``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any], **options: int) -> None:
        self._kernel = kernel
        self._named = constants | options
        self._constants = tuple(constants[n] for n in kernel.arg_names if n in constants)
        self._pointers = len(list(takewhile(lambda n: n.endswith("_ptr"), kernel.arg_names)))
        self._binaries: dict[Hashable, tuple[Any, ...]] = {}

    def __call__(self, grid: tuple[int, int, int], key: Hashable | None, *arguments: Any) -> None:
        """Launch `grid` programs.

        `key` holds every number that Triton specialises on: strides of tensors that come from
        outside, all of them 16-byte aligned. ``None`` asks Triton to look for itself.
        """
        known = None if key is None else self._binaries.get(key)
        if known is None or _HOOKS.launch_enter_hook.calls:
            self._search(grid, key, *arguments)
            return
        start, function, metadata, current_stream, device = known
        addresses = [tensor.data_ptr() for tensor in arguments[: self._pointers]]
        start(
            *grid,
            current_stream(device),
            function,
            metadata,
            None,  # what hooks would be told, before and after
            None,
            None,
            *addresses,
            *arguments[self._pointers :],
            *self._constants,
        )

    def _search(self, grid: tuple[int, int, int], key: Hashable | None, *arguments: Any) -> None:
        """Launch as Triton does, and keep the binary it found."""
        binary = self._kernel[grid](*arguments, **self._named)
        if key is not None and binary is not None:  # the interpreter has none
            self._binaries[key] = (
                binary.run,
                binary.function,
                binary.packed_metadata,
                driver.active.get_current_stream,
                arguments[0].device.index,
            )


def aligned(*tensors: torch.Tensor) -> bool:
    """Return whether every tensor starts at a multiple of 16 bytes, as fresh ones do."""
    bits = 0
    for tensor in tensors:
        bits |= tensor.data_ptr()
    return bits % 16 == 0
