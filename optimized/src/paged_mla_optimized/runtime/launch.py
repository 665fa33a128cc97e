"""Launches of one kernel, without Triton's analysis of arguments that it has seen before.

At every launch Triton looks at every argument for the binary that fits, and encodes every TMA
descriptor, which costs more host time than the launch. A :class:`Launcher` keeps the binary for
each key its caller names, and hands Triton's C launcher addresses, numbers and tensor maps alone.
Profilers that hook into Triton's launches still see each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from inspect import getclosurevars, isfunction
from itertools import compress
from math import gcd
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.cache_keys import settle_key

_HOOKS = triton.knobs.runtime
_TRITON = ".".join(triton.__version__.split(".")[:2])
_KNOWN = {"3.6", "3.7", "3.8", "3.9"}
_NOT_READ = () if _TRITON in {"3.6", "3.7"} else (None,)
"""What Triton's encoder of tensor maps takes besides, for other backends than NVIDIA's."""
FP_FUSION = {"enable_fp_fusion": True}
"""Option of every launch and compilation: ``a * b + c`` may become an instruction that rounds once.

The bits of answers depend on it. By default Triton 3.6 to 3.9 fuse, unless the environment sets
``TRITON_DEFAULT_FP_FUSION=0``; Triton 3.9 warns that 3.10 will not.
"""
MAX_BINARIES = 1024
"""Keys of one kernel whose binaries are kept before all of them are forgotten."""

Grid = tuple[int, int, int]
Start = Callable[[Grid, int, tuple[Any, ...]], None]  # grid, stream, arguments
Device = Callable[[], int]
Stream = Callable[[int], int]  # of a device
Forms = tuple[Any, ...] | None  # Triton's ``tensordesc_meta``; None wants descriptors as they are


class Descriptors:
    """TMA descriptors of one tensor, and what a binary takes in their place.

    Parameters
    ----------
    descriptors : TensorDescriptor
        In the order of the kernel's parameters.
    """

    def __init__(self, *descriptors: Any) -> None:
        self.descriptors = descriptors
        self._forms: Forms = None
        self._arguments = descriptors

    def arguments(self, forms: Forms) -> tuple[Any, ...]:
        """Return tensor maps, shapes and strides in `forms`, made anew only if those change."""
        if forms != self._forms:
            self._forms = forms
            self._arguments = self.descriptors if forms is None else self._encode(forms)
        return self._arguments

    def _encode(self, forms: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            argument
            for descriptor, form in zip(self.descriptors, forms, strict=True)
            for argument in nvidia.make_tensordesc_arg(descriptor, form, *_NOT_READ)
        )


_NO_DESCRIPTORS = Descriptors()


class Launcher:
    """One kernel with the constants and options it is compiled for, on one device.

    Parameters
    ----------
    kernel : triton.JITFunction
        Takes pointers first, then descriptors, then numbers, then constants.
    constants : dict
        ``None`` for pointers that it is compiled without, which are the last of them.
    cluster : int
        So many programs that follow each other along axis 0 run on neighbouring multiprocessors;
        divides the grid. A matter of speed alone: launches by Triton itself go without.
    options : int
        Triton's, such as ``num_warps``; :data:`FP_FUSION` is always among them.
    """

    def __init__(
        self, kernel: Any, constants: dict[str, Any], *, cluster: int = 1, **options: int
    ) -> None:
        settle_key(kernel)
        self._kernel = kernel
        self._cluster = cluster
        given = {name: value for name, value in constants.items() if value is not None}
        self._named = given | options | FP_FUSION
        self._constants = tuple(given[n] for n in kernel.arg_names if n in given)
        self._absent = (None,) * (len(constants) - len(given))
        params = getattr(kernel, "params", ())  # the interpreter keeps no binaries, and has none
        self._specialised = [not p.do_not_specialize_on_alignment for p in params]
        self._binaries: Bounded[Hashable, tuple[Start, Forms, Device, Stream, int]]
        self._binaries = Bounded(MAX_BINARIES)

    def __call__(
        self,
        grid: Grid,
        key: Hashable,
        pointers: tuple[torch.Tensor, ...],
        numbers: tuple[int | float, ...],
        descriptors: Descriptors = _NO_DESCRIPTORS,
    ) -> None:
        """Launch `grid` programs on the device of the first pointer.

        `key` holds every number that Triton specialises on: strides of tensors that come from
        outside. Triton looks for itself if a pointer whose alignment it specialises on is no
        multiple of 16 bytes, as all of a known binary's are; and always in versions whose C
        launcher is not known.
        """
        addresses = [*map(torch.Tensor.data_ptr, pointers)]
        aligned = gcd(16, *compress(addresses, self._specialised)) == 16
        known = self._binaries.get(key) if aligned else None
        if known is None or _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            device = pointers[0].get_device()
            taken = (*pointers, *self._absent, *descriptors.descriptors, *numbers)
            with torch.cuda.device(device):
                binary = self._kernel[grid](*taken, **self._named)
            is_new = known is None and binary is not None  # the interpreter has none
            if aligned and is_new and _TRITON in _KNOWN:
                active = driver.active
                of_device = (active.get_current_device, active.get_current_stream, device)
                self._binaries[key] = (*start_of(binary, self._cluster), *of_device)
            return
        start, forms, current_device, stream_of, device = known
        maps = descriptors.arguments(forms)
        taken = (*addresses, *self._absent, *maps, *numbers, *self._constants)
        if current_device() == device:
            start(grid, stream_of(device), taken)
        else:
            with torch.cuda.device(device):
                start(grid, stream_of(device), taken)


def overlap_options(constants: dict[str, Any]) -> dict[str, int]:
    """Return the options of a kernel that is launched while the one before runs, if it has OVERLAP.

    Such a kernel waits by itself for what it reads.
    """
    return {"launch_pdl": True} if constants["OVERLAP"] else {}


def start_of(binary: Any, cluster: int) -> tuple[Start, Forms]:
    """Return what starts a compiled kernel, and the forms it wants descriptors in.

    That is Triton's C launcher; or Triton's launcher around it, which allocates scratch memory
    where a kernel needs some. Both take their arguments in the order of the `_KNOWN` versions.
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
