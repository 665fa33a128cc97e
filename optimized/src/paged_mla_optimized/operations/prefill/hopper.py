"""Launch the Gluon prefill kernel for Hopper, if TMA can address the tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from paged_mla_optimized.kernels.hopper.prefill import hopper_prefill_kernel
from paged_mla_optimized.operations.attend.hopper import Origin, hopper_layout
from paged_mla_optimized.operations.prefill.portable import Heads, PrefillPlan
from paged_mla_optimized.runtime.bounded import Bounded
from paged_mla_optimized.runtime.kernel_spec import (
    SHORT,
    KernelSpec,
    number,
    overlap_options,
    pointer,
)
from paged_mla_optimized.runtime.launch import Descriptors, Launcher

if TYPE_CHECKING:
    from paged_mla_optimized.config.prefill import PrefillConfig

_NUM_WARPS = 4  # warps of the role that copies; the kernel starts other warps itself
# The box of one copy of each tensor: lines and columns.
_BOXES = ([64, 128], [64, 64], [128, 128], [128, 64], [128, 128])
MAX_LAYERS = 4096
"""The number of layers whose tensor maps are stored; after that, all are dropped."""


def heads_fit(heads: Heads) -> bool:
    """Return whether TMA can address every tensor: lines of all heads, aligned to 16 bytes."""
    return len(heads.k_pe) > 0 and all(map(_fits, heads))


def _fits(tensor: torch.Tensor) -> bool:
    *strides, _ = (stride * tensor.element_size() for stride in tensor.stride())
    aligned = all(n % 16 == 0 for n in (tensor.data_ptr(), *strides))
    # A tensor map whose lines overlap, as with heads before tokens, is not usable.
    return aligned and _columns(tensor) <= tensor.stride(0) and _columns(tensor) < 2**31


def _columns(tensor: torch.Tensor) -> int:
    """Return the columns of a line: of a tensor [lines, H, width], or of [lines, width]."""
    *heads, width = tensor.shape
    return width if len(heads) == 1 else (heads[1] - 1) * tensor.stride(1) + width


class HopperPrefill:
    """Launcher of ``hopper_prefill_kernel``; it stores the tensor maps of layers, but no tensors.

    Parameters
    ----------
    config : PrefillConfig
    programs : int
        Size of the grid; each program processes several work items.
    """

    def __init__(self, config: PrefillConfig, programs: int) -> None:
        self.config = config
        self.programs = programs
        self._kernel = Launcher(hopper_prefill_spec(config))
        self._layers: Bounded[Hashable, Descriptors] = Bounded(MAX_LAYERS)

    def describe(self, heads: Heads) -> Descriptors | None:
        """Return descriptors of a layer's tensors, or None if TMA cannot address one of them."""
        key = tuple((t.data_ptr(), t.shape, t.stride()) for t in heads)
        layer = self._layers.get(key)
        if layer is None and heads_fit(heads):
            layer = self._layers[key] = Descriptors(*map(_described, heads, _BOXES))
        return layer

    def launch(
        self,
        descriptors: Descriptors,
        plan: PrefillPlan,
        heads: Heads,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Write `out` and `lse` of the planned step, which has at least one token.

        `descriptors` are the result of :meth:`describe` for `heads`.
        """
        by_head = (heads.q_nope, heads.q_pe, heads.k_nope, heads.v)
        strides = (*(tensor.stride(1) for tensor in by_head), *out.stride()[:2])
        self._kernel(
            (self.programs, 1, 1),
            strides,
            *(plan.tiles, plan.work, out, lse),
            *(*strides, *lse.stride(), self.config.num_heads, heads.k_nope.shape[0]),
            descriptors,
        )


def _described(tensor: torch.Tensor, box: list[int]) -> TensorDescriptor:
    """Return a descriptor of lines that contain all heads."""
    return TensorDescriptor(
        Origin(tensor.data_ptr(), tensor.dtype),
        [tensor.shape[0], _columns(tensor)],
        [tensor.stride(0), 1],
        box,
        hopper_layout(box),
    )


def hopper_prefill_spec(config: PrefillConfig) -> KernelSpec:
    """Return the kernel; it waits for the kernel before it by itself."""
    types = {
        "tiles_ptr": "*i32",
        "work_ptr": "*i32",
        "out_ptr": pointer(config.dtype),
        "lse_ptr": "*fp32",
        "num_heads": number(config.num_heads),
        **{
            f"{name}_desc": f"tensordesc<{SHORT[config.dtype]}{box},{hopper_layout(box)!r}>"
            for name, box in zip(Heads._fields, _BOXES, strict=True)
        },
    }
    constants = {"scale": config.softmax_scale / math.log(2), "CAUSAL": config.causal}
    options = {"num_warps": _NUM_WARPS} | overlap_options(overlaps=True)
    return KernelSpec(hopper_prefill_kernel, constants, types, options)
