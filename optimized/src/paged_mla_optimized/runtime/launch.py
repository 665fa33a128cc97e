"""Launches of one kernel, without Triton's analysis of arguments that it has seen before.

At every launch Triton looks at every argument for the binary that fits, and encodes every TMA
descriptor, which costs more host time than the launch. A :class:`Launcher` keeps the binary for
each key its caller names, and hands Triton's C launcher addresses, numbers and tensor maps alone.
Profilers that hook into Triton's launches still see each of them.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Hashable, Iterator
from inspect import getclosurevars, isfunction
from typing import Any

import torch
import triton
from triton.backends.nvidia import driver as nvidia
from triton.runtime.driver import driver

from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.cache_keys import settle_key
from paged_mla_optimized.runtime.spec import KernelSpec, leading_pointers

_HOOKS = triton.knobs.runtime
_TRITON = ".".join(triton.__version__.split(".")[:2])
_KNOWN = {"3.6", "3.7", "3.8", "3.9"}
_NOT_READ = () if _TRITON in {"3.6", "3.7"} else (None,)
"""What Triton's encoder of tensor maps takes besides, for other backends than NVIDIA's."""
MAX_BINARIES = 1024
"""Keys of one kernel whose binaries are kept before all of them are forgotten."""

_address = torch.Tensor.data_ptr

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
        self.forms: Forms = None
        self._arguments = descriptors

    def arguments(self, forms: Forms) -> tuple[Any, ...]:
        """Return tensor maps, shapes and strides in `forms`, made anew only if those change."""
        if forms != self.forms:
            self.forms = forms
            self._arguments = self.descriptors if forms is None else self._encode(forms)
        return self._arguments

    def _encode(self, forms: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            argument
            for descriptor, form in zip(self.descriptors, forms, strict=True)
            for argument in nvidia.make_tensordesc_arg(descriptor, form, *_NOT_READ)
        )


class Fixed:
    """An argument that is a record of tensors which never move: lowered once, not at each launch.

    Parameters
    ----------
    record : NamedTuple
        Of tensors alone.
    """

    def __init__(self, record: Any) -> None:
        self.record = record
        self.lowered: tuple[Any, ...] = ()
        self.bits = 0  # of all addresses

    def lower(self) -> tuple[Any, ...]:
        """Return what a binary takes in place of the record."""
        addresses = [*map(_address, self.record)]
        self.lowered, self.bits = tuple(addresses), functools.reduce(operator.or_, addresses)
        return self.lowered


class Launcher:
    """One kernel with the constants and options it is compiled for, on one device.

    Parameters
    ----------
    spec : KernelSpec
    cluster : int
        So many programs that follow each other along axis 0 run on neighbouring multiprocessors;
        divides the grid. A matter of speed alone: launches by Triton itself go without.
    """

    def __init__(self, spec: KernelSpec, *, cluster: int = 1) -> None:
        settle_key(spec.kernel)
        self._kernel = spec.kernel
        self._cluster = cluster
        self._named = spec.launched
        self._constants = spec.lowered_constants
        params = getattr(spec.kernel, "params", ())  # the interpreter keeps no binaries: has none
        # Of each parameter's addresses, the bits that have to be 0.
        self._masks = [0 if p.do_not_specialize_on_alignment else 15 for p in params]
        types = [spec.types.get(name) for name in spec.kernel.arg_names]
        self._records = [type(one) if isinstance(one, tuple) else None for one in types]
        self._pointers = [leading_pointers(one) for one in types]
        self._binaries: Bounded[Hashable, tuple[Start, Forms, _Layout, Device, Stream, int]]
        self._binaries = Bounded(MAX_BINARIES)

    def __call__(self, grid: Grid, key: Hashable, *arguments: Any) -> None:
        """Launch `grid` programs on the device of the first tensor.

        `arguments` are those of the kernel's parameters but its constants, in order: tensors,
        numbers, tuples of the fields of records, :class:`Fixed` records, and for the TMA
        descriptors, which are the last, one :class:`Descriptors`.

        `key` holds every number that Triton specialises on: strides of tensors that come from
        outside. Triton looks for itself if a pointer whose alignment it specialises on is no
        multiple of 16 bytes, as all of a known binary's are; and always in versions whose C
        launcher is not known.
        """
        known = self._binaries.get(key)
        if known is None or _HOOKS.launch_enter_hook.calls or _HOOKS.launch_exit_hook.calls:
            self._launch_by_triton(grid, key, arguments)
            return
        start, forms, layout, current_device, stream_of, device = known
        lowered, bits = layout.lower(arguments, forms)
        lowered += self._constants
        if bits:
            self._launch_by_triton(grid, key, arguments)
        elif current_device() == device:
            start(grid, stream_of(device), lowered)
        else:
            with torch.cuda.device(device):
                start(grid, stream_of(device), lowered)

    def _launch_by_triton(self, grid: Grid, key: Hashable, arguments: tuple[Any, ...]) -> None:
        """Launch as Triton does, and keep the binary that it finds for aligned arguments."""
        device = next(_tensors(arguments)).get_device()
        with torch.cuda.device(device):
            binary = self._kernel[grid](*self._as_records(arguments), **self._named)
        if binary is None or _TRITON not in _KNOWN or self._binaries.get(key) is not None:
            return  # the interpreter has none
        layout = _Layout(arguments, self._masks, self._pointers)
        if not layout.bits(arguments):
            active = driver.active
            of_device = (active.get_current_device, active.get_current_stream, device)
            self._binaries[key] = (*start_of(binary, self._cluster), layout, *of_device)

    def _as_records(self, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the arguments that Triton's launch takes."""
        for argument, record in zip(arguments, self._records, strict=False):
            if isinstance(argument, Descriptors):
                yield from argument.descriptors
            elif isinstance(argument, Fixed):
                yield argument.record
            else:
                yield record(*argument) if record is not None else argument


class _Layout:
    """Where the tensors are among the arguments of a launch.

    Parameters
    ----------
    arguments : tuple
        Of a launch; later ones have the same kinds.
    masks : list of int
        Of each parameter's addresses, the bits that have to be 0.
    pointers : list of int
        How many addresses each parameter begins with that is a record.
    """

    def __init__(self, arguments: tuple[Any, ...], masks: list[int], pointers: list[int]) -> None:
        self._tensors: list[tuple[int, int]] = []
        self._fixed: list[tuple[int, int]] = []
        self._lines: list[tuple[int, int]] = []  # records with one address
        self._records: list[tuple[int, int, int]] = []
        self._has_descriptors = isinstance(arguments[-1], Descriptors)
        for at, (argument, mask) in enumerate(zip(arguments, masks, strict=False)):
            if isinstance(argument, torch.Tensor):
                self._tensors.append((at, mask))
            elif isinstance(argument, Fixed):
                self._fixed.append((at, mask))
            elif isinstance(argument, tuple) and pointers[at] == 1:
                self._lines.append((at, mask))
            elif isinstance(argument, tuple) and pointers[at] > 1:
                self._records.append((at, mask, pointers[at]))

    def lower(self, arguments: tuple[Any, ...], forms: Forms) -> tuple[tuple[Any, ...], int]:
        """Return what a binary takes, and those bits of addresses that have to be 0."""
        lowered = list(arguments)
        bits = 0
        for at, mask in self._tensors:
            address = lowered[at] = lowered[at].data_ptr()
            bits |= address & mask
        for at, mask in self._fixed:
            fixed = lowered[at]
            lowered[at] = fixed.lowered or fixed.lower()
            bits |= fixed.bits & mask
        for at, mask in self._lines:
            tensor, *rest = lowered[at]
            address = tensor.data_ptr()
            lowered[at] = (address, *rest)
            bits |= address & mask
        for at, mask, pointers in self._records:
            record = lowered[at]
            addresses = [*map(_address, record[:pointers])]
            lowered[at] = (*addresses, *record[pointers:])
            for address in addresses:
                bits |= address & mask
        if self._has_descriptors:
            lowered[-1:] = lowered[-1].arguments(forms)
        return tuple(lowered), bits

    def bits(self, arguments: tuple[Any, ...]) -> int:
        """Return the bits of addresses that have to be 0."""
        forms = arguments[-1].forms if self._has_descriptors else None
        return self.lower(arguments, forms)[1]


def _tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a launch."""
    for argument in arguments:
        parts = argument.record if isinstance(argument, Fixed) else argument
        for part in parts if isinstance(parts, tuple) else (parts,):
            if isinstance(part, torch.Tensor):
                yield part


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
