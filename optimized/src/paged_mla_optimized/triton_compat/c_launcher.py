"""Triton's C launcher, called without the analysis of arguments in front of it."""

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
    """Return whether the C launcher of a version of Triton takes its arguments as it does here."""
    return version in {"3.6", "3.7", "3.8", "3.9"}


KNOWS_C_LAUNCHER = is_known(_TRITON)
"""Whether that holds for the installed version."""
_NOT_READ = () if _TRITON in {"3.6", "3.7"} else (None,)
"""What Triton's encoder of tensor maps takes besides, for other backends than NVIDIA's."""

Grid = tuple[int, int, int]
Start = Callable[[Grid, int, tuple[Any, ...]], None]  # grid, stream, arguments
Device = Callable[[], int]
Stream = Callable[[int], int]  # of a device
Forms = tuple[Any, ...] | None  # Triton's ``tensordesc_meta``; None wants descriptors as they are


def launch_hooks() -> Any:
    """Return what listens to Triton's launches, as profilers do; nothing is false."""
    return _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls


def device_and_stream() -> tuple[Device, Stream]:
    """Return what tells the current device, and the current stream of a device."""
    active = driver.active
    return active.get_current_device, active.get_current_stream


def encoded(descriptor: Any, form: Any) -> Iterable[Any]:
    """Return the tensor map, shape and strides that a binary takes for a TMA descriptor."""
    found: Iterable[Any] = nvidia.make_tensordesc_arg(descriptor, form, *_NOT_READ)
    return found


def start_of(binary: Any, cluster: int) -> tuple[Start, Forms]:
    """Return what starts a compiled kernel, and the forms it wants descriptors in.

    That is Triton's C launcher; or Triton's launcher around it, which allocates scratch memory
    where a kernel needs some. Both take their arguments in the order of the known versions.
    """
    run, function = binary.run, binary.function
    hooks = (None, None, None)  # what they would be told, and they
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
    """Return what `run`, a ``CudaLauncher``, calls once it has encoded the descriptors."""
    if not isfunction(run.launch):  # it has none to encode
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
