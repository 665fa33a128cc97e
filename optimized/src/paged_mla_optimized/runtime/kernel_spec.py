"""The declaration of a kernel's constants, options and argument types, next to its launcher.

Launches use the kernel, its constants and its options from a :class:`KernelSpec`. Ahead-of-time
compilation also uses the types of its arguments. Types are written as in ``triton.tools.compile``:
``*fp32`` is a pointer, ``i32:16`` a number that is divisible by 16, ``i32:1`` a number that is 1.

The parameters of a kernel have this order: the arguments of each launch, with TMA descriptors last,
then the constants. Both can be records: ``NamedTuple`` classes whose fields are parameters too. A
record has either constants only, or arguments only with the pointers first. Triton 3.6.0 and 3.7.1
specialize on every field of a record, regardless of ``do_not_specialize``
(``native_specialize_impl``), and accept TMA descriptors only as separate parameters. Therefore
descriptors, and arguments without specialization, are not fields of records.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import triton.language as tl

from paged_mla_optimized.triton_compat.kernels import parameter_names

FP_FUSION = {"enable_fp_fusion": True}
"""Option of every launch and compilation: ``a * b + c`` may become one instruction, rounded once.

The bits of outputs depend on it. By default Triton 3.6 to 3.9 fuse, unless the environment sets
``TRITON_DEFAULT_FP_FUSION=0``. Triton 3.9 warns that 3.10 will not fuse.
"""
STRIDE = "i32:16"
"""The type of a stride; ahead of time all strides except DENSE are multiples of 16."""
DENSE = "i32:1"
"""The type of a stride that is 1 in the tensors of every engine; Triton compiles it as constant."""
SHORT = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int16: "i16",
    torch.uint8: "u8",
}
"""Triton's names of dtypes."""


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with the constants, types and options that it is compiled for.

    Parameters
    ----------
    kernel : triton.JITFunction
    constants : dict
        Value of each constant, by parameter; for a record of constants, the record.
    types : dict
        Type of each argument, by parameter; for a record, a record of types. ``None`` marks an
        argument that the kernel is compiled without. Parameters that are missing here are ``i32``,
        or :data:`STRIDE` for strides.
    options : dict
        Triton's options, such as ``num_warps``; :data:`FP_FUSION` is always added.
    """

    kernel: Any
    constants: dict[str, Any]
    types: dict[str, Any] = field(default_factory=dict)
    options: dict[str, int] = field(default_factory=dict)

    @property
    def launched(self) -> dict[str, Any]:
        """Constants and options by name, as Triton's launch accepts them."""
        return {n: wrapped(v) for n, v in self.constants.items()} | self.options | FP_FUSION

    @property
    def lowered_constants(self) -> tuple[Any, ...]:
        """Constants in the order of the parameters, as Triton's C launcher accepts them."""
        names = [name for name in parameter_names(self.kernel) if name in self.constants]
        return tuple(_plain(self.constants[name]) for name in names)

    @property
    def flat_constants(self) -> dict[str, Any]:
        """Value of each constant by its name, including constants in records."""
        return dict(_leaves(self.constants))


class NamedSpec(NamedTuple):
    """A kernel variant that is compiled ahead of time.

    Parameters
    ----------
    name : str
        The name of the variant in reports.
    spec : KernelSpec
    dtype : str
        The dtype of queries and new latents as in :data:`SHORT`; "i32" for the kernels of a plan.
    """

    name: str
    spec: KernelSpec
    dtype: str


def pointer(dtype: torch.dtype) -> str:
    """Return the pointer type of a tensor; dtypes that :data:`SHORT` lacks become integers."""
    return f"*{SHORT.get(dtype, f'i{8 * dtype.itemsize}')}"


def number(value: int) -> str:
    """Return the type of a number of a config; Triton specializes on 1 and on multiples of 16."""
    return DENSE if value == 1 else "i32:16" if value % 16 == 0 else "i32"


def overlap_options(overlaps: bool) -> dict[str, int]:  # noqa: FBT001 - calls read as the name does
    """Return the launch options of a kernel.

    A kernel that `overlaps` may start while the kernel before it runs; it waits for its inputs.
    """
    return {"launch_pdl": True} if overlaps else {}


def leading_pointers(type_: Any) -> int:
    """Return the number of pointers of a record, which must be its first fields; else 0."""
    fields = type_ if isinstance(type_, tuple) else ()
    is_pointer = [str(one).startswith("*") for one in fields]
    if sorted(is_pointer, reverse=True) != is_pointer:
        raise TypeError(f"the pointers of a record are not its first fields: {type_}")
    return is_pointer.count(True)


def wrapped(constant: Any) -> Any:
    """Return a constant as Triton's launch accepts it: in a record, each field is a constexpr."""
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
