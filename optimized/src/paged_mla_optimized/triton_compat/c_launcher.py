"""Calls of Triton's C launcher without Triton's analysis of arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import getclosurevars, isfunction
from typing import Any

import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

_HOOKS = triton.knobs.runtime
_TRITON = ".".join(triton.__version__.split(".")[:2])


def is_known(version: str) -> bool:
    """Return whether the C launcher of a Triton version takes its arguments as used here."""
    return version in {"3.6", "3.7", "3.8", "3.9"}


KNOWS_C_LAUNCHER = is_known(_TRITON)
"""Whether the C launcher of the installed version is known."""
_NOT_READ = () if _TRITON in {"3.6", "3.7"} else (None,)
"""Additional arguments of Triton's encoder of tensor maps, which the NVIDIA backend ignores."""

Grid = tuple[int, int, int]
Start = Callable[[Grid, int, tuple[Any, ...]], None]  # grid, stream, arguments
Device = Callable[[], int]
Stream = Callable[[int], int]  # from a device index
Forms = tuple[Any, ...] | None  # Triton's ``tensordesc_meta``; None: descriptors are not encoded


def launch_hooks() -> Any:
    """Return the hooks that are called at Triton's launches, such as profilers; falsy if none."""
    return _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls


def device_and_stream() -> tuple[Device, Stream]:
    """Return functions for the current device, and for the current stream of a device."""
    active = driver.active
    return active.get_current_device, active.get_current_stream


def encoded(descriptor: Any, form: Any) -> Iterable[Any]:
    """Return the tensor map, shape and strides that a binary takes for a TMA descriptor."""
    found: Iterable[Any] = nvidia.make_tensordesc_arg(descriptor, form, *_NOT_READ)
    return found


def start_of(binary: Any, cluster: int) -> tuple[Start, Forms]:
    """Return a function that starts a compiled kernel, and the forms of its descriptors.

    The function is Triton's C launcher. For a kernel that needs scratch memory it is Triton's
    launcher around the C launcher, which allocates it. Both take their arguments in the order of
    the known versions.
    """
    run, function = binary.run, binary.function
    hooks = (None, None, None)  # the arguments of the hooks, and the two hooks
    if run.global_scratch_size or run.profile_scratch_size:
        return _start_flat(run, 1, (function, binary.packed_metadata, *hooks)), None
    launch, forms = _c_launcher(run)
    num_warps, _, shared = binary.packed_metadata
    told = ((num_warps, cluster, shared), *hooks)
    flags = (run.launch_cooperative_grid, run.launch_pdl)
    scratch = (None, None)
    if _TRITON == "3.6":
        return _start_flat(launch, cluster, (function, *flags, *scratch, *told)), forms
    types = (run.arg_annotations, run.kernel_signature)
    return _start_packed(launch, cluster, (function, *flags, *told, *scratch, *types)), forms


def _c_launcher(run: Any) -> tuple[Any, Forms]:
    """Return the C launcher that `run`, a ``CudaLauncher``, calls after it encodes descriptors."""
    if not isfunction(run.launch):  # the kernel has no descriptors
        return run.launch, ()
    enclosed = getclosurevars(run.launch).nonlocals
    return enclosed["launcher"], tuple(enclosed["tensordesc_meta"])


def _start_flat(launch: Any, cluster: int, fixed: tuple[Any, ...]) -> Start:
    def start(grid: Grid, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(grid[0] // cluster, grid[1], grid[2], stream, *fixed, *arguments)

    return start


def _start_packed(launch: Any, cluster: int, fixed: tuple[Any, ...]) -> Start:
    def start(grid: Grid, stream: int, arguments: tuple[Any, ...]) -> None:
        launch(grid[0] // cluster, grid[1], grid[2], stream, *fixed, arguments)

    return start
