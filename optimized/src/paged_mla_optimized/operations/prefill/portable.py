"""Launch the plan of a prefill, and the portable prefill kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from paged_mla_optimized.config.architectures import OVERLAPPING
from paged_mla_optimized.config.limits import largest_power_of_two
from paged_mla_optimized.kernels.common.prefill_plan import (
    TILE_WORDS,
    WORK_WORDS,
    prefill_plan_kernel,
)
from paged_mla_optimized.kernels.portable.prefill import prefill_kernel
from paged_mla_optimized.planning.prefill import PrefillVariant
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.runtime.kernel_spec import DENSE, KernelSpec, number, pointer
from paged_mla_optimized.runtime.launch import Launcher

if TYPE_CHECKING:
    from paged_mla_optimized.config.prefill import PrefillConfig

_L2_BYTES = 30_000_000  # the part for keys and values of the 50 MB of an H200
_COMPARISONS = 1024  # comparisons of a tile with a row, in one program of the plan
_PLAN_WARPS = 4


class Heads(NamedTuple):
    """One layer's tensors, as in :meth:`paged_mla_optimized.api.prefill.Prefill.attend`."""

    q_nope: torch.Tensor
    q_pe: torch.Tensor
    k_nope: torch.Tensor
    k_pe: torch.Tensor
    v: torch.Tensor


class PrefillPlan:
    """Launcher of ``prefill_plan_kernel``, with the buffers that the kernel fills.

    Parameters
    ----------
    config : PrefillConfig
    tile_m : int
        Tokens of one query tile.
    facts : DeviceFacts
        The facts of `device`.
    device : torch.device

    Attributes
    ----------
    tile_m : int
    tiles : int32 [most tiles, 8]
    work : int32 [4]
        See ``kernels/common/prefill_plan.py``.
    num_rows, num_tokens : int
        B and T of the planned step.
    """

    def __init__(
        self, config: PrefillConfig, tile_m: int, facts: DeviceFacts, device: torch.device
    ) -> None:
        self.config = config
        self.tile_m = tile_m
        self._programs = facts.num_sms
        most = _most_tiles(config.max_rows, config.max_tokens, tile_m)
        self.tiles = torch.zeros((most, TILE_WORDS.value), dtype=torch.int32, device=device)
        self.work = torch.zeros(WORK_WORDS.value, dtype=torch.int32, device=device)
        self.num_rows = 0
        self.num_tokens = 0
        spec = plan_spec(config, tile_m, facts.arch)
        self._tiles_of_program = spec.constants["TILES"]
        self._kernel = Launcher(spec)

    @property
    def most_tiles(self) -> int:
        """Upper bound of the query tiles of the planned step."""
        return _most_tiles(self.num_rows, self.num_tokens, self.tile_m)

    def fill(self, cu_seqlens_q: torch.Tensor, cu_seqlens_k: torch.Tensor, num_tokens: int) -> None:
        """Plan a step with one kernel launch."""
        self.num_rows, self.num_tokens = cu_seqlens_q.shape[0] - 1, num_tokens
        strides = (*cu_seqlens_q.stride(), *cu_seqlens_k.stride())
        self._kernel(
            (-(-self.most_tiles // self._tiles_of_program), 1, 1),
            strides,
            *(cu_seqlens_q, cu_seqlens_k, self.tiles, self.work),
            *(*strides, self.num_rows, num_tokens, self.config.num_heads, self._programs),
        )


class PortablePrefill:
    """Launcher of ``prefill_kernel``, which supports any strides and any architecture.

    Parameters
    ----------
    config : PrefillConfig
    variant : PrefillVariant
    """

    def __init__(self, config: PrefillConfig, variant: PrefillVariant) -> None:
        self.config = config
        self._kernel = Launcher(portable_spec(config, variant))

    def launch(
        self, plan: PrefillPlan, heads: Heads, *, out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        """Write `out` and `lse` of the planned step, which has at least one token."""
        strides = tuple(n for tensor in (*heads, out) for n in tensor.stride()[:-1])
        self._kernel(
            (plan.most_tiles * self.config.num_heads, 1, 1),
            strides,
            *(*heads, plan.tiles, plan.work, out, lse),
            *strides,
            *lse.stride(),
            self.config.softmax_scale,
            self.config.num_heads,
            heads.k_nope.shape[0],
        )


def plan_spec(config: PrefillConfig, tile_m: int, arch: str) -> KernelSpec:
    """Return the kernel that plans a step."""
    types = {
        "cu_seqlens_q_ptr": "*i32",
        "cu_seqlens_k_ptr": "*i32",
        "tiles_ptr": "*i32",
        "work_ptr": "*i32",
        "stride_cu_q": DENSE,
        "stride_cu_k": DENSE,
        "num_heads": number(config.num_heads),
    }
    rows = triton.next_power_of_2(config.max_rows + 1)
    key_bytes = (config.qk_nope_head_dim + config.v_head_dim) * config.dtype.itemsize
    constants = {
        "CAUSAL": config.causal,
        "WRITES_EMPTY": config.writes_empty,
        "TILE_M": tile_m,
        "L2_KEYS": _L2_BYTES // key_bytes,
        "HEADS": triton.next_power_of_2(config.num_heads),
        "ROWS": rows,
        "TILES": min(max(_COMPARISONS // rows, 1), 64),
        "OVERLAP": arch in OVERLAPPING,
    }
    return KernelSpec(prefill_plan_kernel, constants, types, {"num_warps": _PLAN_WARPS})


def portable_spec(config: PrefillConfig, variant: PrefillVariant) -> KernelSpec:
    """Return the portable prefill kernel."""
    head = pointer(config.dtype)
    types = {
        **{f"{name}_ptr": head for name in Heads._fields},
        "tiles_ptr": "*i32",
        "work_ptr": "*i32",
        "out_ptr": head,
        "lse_ptr": "*fp32",
        "softmax_scale": "fp32",
        "num_heads": number(config.num_heads),
    }
    constants = {
        "NOPE": config.qk_nope_head_dim,
        "WIDE": largest_power_of_two(config.qk_nope_head_dim),
        "ROPE": config.qk_rope_head_dim,
        "V": config.v_head_dim,
        "CAUSAL": config.causal,
        "TILE_M": variant.tile_m,
        "TILE_N": variant.tile_n,
    }
    options = {"num_warps": variant.num_warps, "num_stages": variant.num_stages}
    return KernelSpec(prefill_kernel, constants, types, options)


def _most_tiles(num_rows: int, num_tokens: int, tile_m: int) -> int:
    """Return the most query tiles: each row, and the padding, may end in a partial tile."""
    return num_tokens // tile_m + num_rows + 1
