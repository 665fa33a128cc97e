"""Merge partial results of one set of queries (rule S-8)."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from paged_mla_optimized.kernels.common.merge import merge_kernel
from paged_mla_optimized.runtime.device import device_facts
from paged_mla_optimized.runtime.kernel_spec import KernelSpec
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_shared.errors import InvalidArgument

_ROWS_PER_PROGRAM = 4
_LARGEST_WIDTH = 2**20 // _ROWS_PER_PROGRAM  # Triton's limit of elements, over a program's rows


def merge_partials(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge `n` partial results into one output.

    Parameters
    ----------
    outs : float32 [n, T, H, R]
        Normalized partial outputs, with n >= 1 and R from 1 to 2^18. They may have any value where
        ``lses`` is -inf.
    lses : float32 [n, T, H]
        Their natural-log sums of exponentials; -inf marks an empty partial result.

    Returns
    -------
    out : float32 [T, H, R]
    lse : float32 [T, H]
        (0, -inf) where every partial result is empty.

    Raises
    ------
    InvalidArgument
        ``outs`` or ``lses`` has a wrong shape, dtype or device, n or R is 0, or R is too large.
    Unsupported
        No kernel runs on the device of ``outs``.

    Notes
    -----
    Rule S-8 applies. The results are new tensors; strided inputs are copied.
    """
    if torch.compiler.is_compiling():
        found: tuple[torch.Tensor, torch.Tensor] = merge(outs, lses)
        return found
    return _merged(outs, lses)


def _merged(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensor("outs", outs, (None, None, None, None), torch.float32, None)
    check_tensor("lses", lses, tuple(outs.shape[:3]), torch.float32, outs.device)
    num_partials, tokens, heads, width = outs.shape
    for what, count in (("partial result", num_partials), ("latent column", width)):
        if count < 1:
            raise InvalidArgument("outs", f"no {what}", "at least one")
    if width > _LARGEST_WIDTH:
        raise InvalidArgument("outs", f"R = {width}", f"at most {_LARGEST_WIDTH}")
    if outs.device.type != "cuda":
        device_facts(outs.device)
    out = torch.empty((tokens, heads, width), dtype=torch.float32, device=outs.device)
    lse = torch.empty((tokens, heads), dtype=torch.float32, device=outs.device)
    pairs = tokens * heads
    if pairs > 0:
        with torch.cuda.device(outs.get_device()):
            merge_kernel[(-(-pairs // _ROWS_PER_PROGRAM),)](
                outs.contiguous(),
                lses.contiguous(),
                out,
                lse,
                num_partials,
                pairs,
                width,
                **merge_spec(width).launched,
            )
    return out, lse


@torch.library.custom_op("paged_mla::merge", mutates_args=())
def merge(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """Merge partial results in a compiled function, see :func:`merge_partials`."""
    return _merged(outs, lses)


@merge.register_fake
def _(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    return outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])


def merge_spec(width: int) -> KernelSpec:
    """Return the kernel that merges partial results of R = `width`."""
    constants = {"ROWS": _ROWS_PER_PROGRAM, "COLUMNS": triton.next_power_of_2(width)}
    pointers = ("outs_ptr", "lses_ptr", "out_ptr", "lse_ptr")
    return KernelSpec(merge_kernel, constants, dict.fromkeys(pointers, "*fp32"))
