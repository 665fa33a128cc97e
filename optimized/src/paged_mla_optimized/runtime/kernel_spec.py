"""What a kernel is compiled for, declared once, beside the launcher of its operation.

Launches take the kernel, its constants and its options from a :class:`KernelSpec`; ahead-of-time
compilation takes the types of its arguments besides. Types are spelled as ``triton.tools.compile``
does: ``*fp32`` is a pointer, ``i32:16`` a number that 16 divides, ``i32:1`` one that is 1.

Parameters come in this order: what each launch brings, with TMA descriptors as the last, then the
constants. Either may be records, ``NamedTuple`` classes whose fields are parameters too. A record
holds constants alone, or arguments alone, the pointers first.
Triton 3.6.0 and 3.7.1 specialise on every field of a record, whatever ``do_not_specialize`` names
(``native_specialize_impl``), and take TMA descriptors as parameters of their own alone: what is
not to be specialised on, and descriptors, stay outside records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton.language as tl

from paged_mla_optimized.triton_compat.kernels import parameter_names

FP_FUSION = {"enable_fp_fusion": True}
"""Option of every launch and compilation: ``a * b + c`` may become an instruction that rounds once.

The bits of answers depend on it. By default Triton 3.6 to 3.9 fuse, unless the environment sets
``TRITON_DEFAULT_FP_FUSION=0``; Triton 3.9 warns that 3.10 will not.
"""
STRIDE = "i32:16"
"""A stride; so that rows can be aligned, ahead of time 16 divides all of them but DENSE."""
DENSE = "i32:1"
"""A stride that is 1 in every engine's tensors; Triton compiles it in."""
SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.uint8: "u8",
}
"""Triton's names of types."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel, and what it is compiled for.

    Parameters
    ----------
    kernel : triton.JITFunction
    constants : dict
        Value of each constant, by parameter; of a record of constants, the record.
    types : dict
        Type of each argument, by parameter; of a record, a record of types, and None for what a
        kernel is compiled without. Those left out are ``i32``, and strides :data:`STRIDE`.
    options : dict
        Triton's options, such as ``num_warps``; :data:`FP_FUSION` is always among them.
    """

    kernel: Any
    constants: dict[str, Any]
    types: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def launched(self) -> dict[str, Any]:
        """Constants and options as Triton's launch takes them, by name."""
        return {n: wrapped(v) for n, v in self.constants.items()} | self.options | FP_FUSION

    @property
    def lowered_constants(self) -> tuple[Any, ...]:
        """Constants in the order of the parameters, as Triton's C launcher takes them."""
        names = [name for name in parameter_names(self.kernel) if name in self.constants]
        return tuple(_plain(self.constants[name]) for name in names)

    @property
    def flat_constants(self) -> dict[str, Any]:
        """Value of each constant by its name, of those in records too."""
        return dict(_leaves(self.constants))


class NamedSpec(NamedTuple):
    """A variant of a kernel to compile ahead of time.

    Parameters
    ----------
    name : str
        What reports call it.
    spec : KernelSpec
    dtype : str
        Of queries and new latents, as :data:`SHORT` spells it; "i32" for the kernels of a plan.
    """

    name: str
    spec: KernelSpec
    dtype: str


def pointer(dtype: torch.dtype) -> str:
    """Return the type of a tensor's address; integers stand for what Triton has no name of here."""
    return f"*{SHORT.get(dtype, f'i{8 * dtype.itemsize}')}"


def number(value: int) -> str:
    """Return the type of a number of a config: Triton compiles for 1, and for multiples of 16."""
    return DENSE if value == 1 else "i32:16" if value % 16 == 0 else "i32"


def overlap_options(overlaps: bool) -> dict[str, int]:  # noqa: FBT001 - calls read as the name does
    """Return the options of a kernel; one that `overlaps` starts while the one before it runs.

    Such a kernel waits by itself for what it reads.
    """
    return {"launch_pdl": True} if overlaps else {}


def leading_pointers(type_: Any) -> int:
    """Return how many fields of a record are addresses, which are the first; 0 for other types."""
    fields = type_ if isinstance(type_, tuple) else ()
    is_pointer = [str(one).startswith("*") for one in fields]
    if sorted(is_pointer, reverse=True) != is_pointer:
        raise TypeError(f"the pointers of a record are not its first fields: {type_}")
    return is_pointer.count(True)


def wrapped(constant: Any) -> Any:
    """Return a constant as Triton's launch takes it: the fields of a record say what they are."""
    if isinstance(constant, tuple):
        return type(constant)(*map(tl.constexpr, constant))
    return constant


def _plain(constant: Any) -> Any:
    return tuple(constant) if isinstance(constant, tuple) else constant


def _leaves(named: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in named.items():
        if hasattr(value, "_asdict"):
            yield from _leaves(value._asdict())
        else:
            yield name, value
