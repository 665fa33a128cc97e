"""Launch one kernel without Triton's analysis of arguments that it has analyzed before.

At every launch Triton analyzes every argument to find the binary, and encodes every TMA descriptor.
This costs more host time than the launch. A :class:`Launcher` stores the binary for each key that
its caller passes, and passes only addresses, numbers and tensor maps to Triton's C launcher.
Profilers that hook into Triton's launches still see every launch.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch

from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.kernel_spec import KernelSpec, leading_pointers
from paged_mla_optimized.triton_compat.c_launcher import (
    KNOWS_C_LAUNCHER,
    Device,
    Forms,
    Grid,
    Start,
    Stream,
    device_and_stream,
    encoded,
    launch_hooks,
    start_of,
)
from paged_mla_optimized.triton_compat.cache_keys import settle_key
from paged_mla_optimized.triton_compat.kernels import parameter_names, parameters_of

MAX_BINARIES = 1024
"""The number of keys of one kernel whose binaries are stored; after that, all are dropped."""

_address = torch.Tensor.data_ptr


class Descriptors:
    """The TMA descriptors of one tensor, and the arguments that a binary takes instead of them.

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
        """Return tensor maps, shapes and strides in `forms`, encoded again if `forms` changes."""
        if forms != self.forms:
            self.forms = forms
            self._arguments = self.descriptors if forms is None else self._encode(forms)
        return self._arguments

    def _encode(self, forms: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            argument
            for descriptor, form in zip(self.descriptors, forms, strict=True)
            for argument in encoded(descriptor, form)
        )


class Fixed:
    """An argument that is a record of tensors that never move; it is lowered only once.

    Parameters
    ----------
    record : NamedTuple
        A record of tensors only.
    """

    def __init__(self, record: Any) -> None:
        self.record = record
        self.lowered: tuple[Any, ...] = ()
        self.bits = 0  # bitwise or of all addresses

    def lower(self) -> tuple[Any, ...]:
        """Return the addresses that a binary takes instead of the record."""
        addresses = [*map(_address, self.record)]
        self.lowered, self.bits = tuple(addresses), functools.reduce(operator.or_, addresses)
        return self.lowered


class Launcher:
    """One kernel with its constants and options, on one device.

    Parameters
    ----------
    spec : KernelSpec
    cluster : int
        Number of consecutive programs along axis 0 that run on neighboring multiprocessors; a
        divisor of the grid. It affects only speed: launches by Triton itself ignore it.
    """

    def __init__(self, spec: KernelSpec, *, cluster: int = 1) -> None:
        settle_key(spec.kernel)
        self._kernel = spec.kernel
        self._cluster = cluster
        self._named = spec.launched
        self._constants = spec.lowered_constants
        # For each parameter, the address bits that must be 0.
        self._masks = [
            15 if p.is_specialized_on_alignment else 0 for p in parameters_of(spec.kernel)
        ]
        types = [spec.types.get(name) for name in parameter_names(spec.kernel)]
        self._records = [type(one) if isinstance(one, tuple) else None for one in types]
        self._pointers = [leading_pointers(one) for one in types]
        self._binaries: Bounded[Hashable, tuple[Start, Forms, _Layout, Device, Stream, int]]
        self._binaries = Bounded(MAX_BINARIES)

    def __call__(self, grid: Grid, key: Hashable, *arguments: Any) -> None:
        """Launch `grid` programs on the device of the first tensor.

        `arguments` are the arguments of all parameters except constants, in order: tensors,
        numbers, tuples of the fields of records, :class:`Fixed` records, and one
        :class:`Descriptors` for the TMA descriptors, which are last.

        `key` must contain every number on which Triton specializes, that is the strides of tensors
        from outside. The binaries are for pointers at multiples of 16 bytes. If a pointer is not,
        and the kernel specializes on its alignment, Triton launches the kernel itself. It also
        does so in Triton versions whose C launcher is not known.
        """
        known = self._binaries.get(key)
        if known is None or launch_hooks():
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
        """Launch with Triton, and store the binary if the arguments are aligned."""
        device = next(_tensors(arguments)).get_device()
        with torch.cuda.device(device):
            binary = self._kernel[grid](*self._as_records(arguments), **self._named)
        if binary is None or not KNOWS_C_LAUNCHER or self._binaries.get(key) is not None:
            return  # the interpreter has no binary
        layout = _Layout(arguments, self._masks, self._pointers)
        if not layout.bits(arguments):
            started = start_of(binary, self._cluster)
            self._binaries[key] = (*started, layout, *device_and_stream(), device)

    def _as_records(self, arguments: tuple[Any, ...]) -> Iterator[Any]:
        """Yield the arguments for Triton's launch."""
        for argument, record in zip(arguments, self._records, strict=False):
            if isinstance(argument, Descriptors):
                yield from argument.descriptors
            elif isinstance(argument, Fixed):
                yield argument.record
            else:
                yield record(*argument) if record is not None else argument


class _Layout:
    """The indices of tensors and records among the arguments of a launch.

    Parameters
    ----------
    arguments : tuple
        Arguments of a launch; later launches have arguments of the same kinds.
    masks : list of int
        For each parameter, the address bits that must be 0.
    pointers : list of int
        For each parameter that is a record, the number of its leading addresses.
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
        """Return the arguments of a binary, and the address bits that should be 0."""
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
        """Return the address bits that should be 0."""
        forms = arguments[-1].forms if self._has_descriptors else None
        return self.lower(arguments, forms)[1]


def _tensors(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
    """Yield the tensors of a launch."""
    for argument in arguments:
        parts = argument.record if isinstance(argument, Fixed) else argument
        for part in parts if isinstance(parts, tuple) else (parts,):
            if isinstance(part, torch.Tensor):
                yield part
