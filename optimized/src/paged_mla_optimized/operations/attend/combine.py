"""Launch the kernel that combines partial results."""

from __future__ import annotations

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.combine import combine_kernel
from paged_mla_optimized.kernels.common.token_head import Lines, Partials
from paged_mla_optimized.operations.argument_types import partial_dtype
from paged_mla_optimized.planning.families import PORTABLE, AttendVariant
from paged_mla_optimized.planning.plan import Plan, most_joins
from paged_mla_optimized.runtime.kernel_spec import STRIDE, KernelSpec, overlap_options, pointer
from paged_mla_optimized.runtime.launch import Fixed, Launcher
from paged_mla_optimized.tensors.queries import Answer
from paged_mla_optimized.triton_compat.interpreter import is_interpreting

_NUM_WARPS = 1  # small programs, of which many start as soon as attend programs end
_MAX_REGISTERS = 128  # per thread, so that 16 programs fit on a multiprocessor
_PIECE = 32  # columns of a pair that ``_join_share`` processes at once, of 64 partial results


class Combine:
    """Launcher of ``combine_kernel``.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    programs : int
        Programs of the attend kernel, which bound its number of parts.
    """

    def __init__(self, config: MlaConfig, variant: AttendVariant, programs: int) -> None:
        self.config = config
        self.variant = variant
        lanes = _least_lanes(config, variant)
        self.parts = programs // lanes
        # This many programs per attend program can read all partial results of a tile at once.
        workers = 16 if variant.tile_m <= 32 else 16 * max(lanes, 2)
        self.workers = self.parts * (2 if is_interpreting() else workers)
        self.pieces = variant.tile_m * -(-config.kv_lora_rank // _PIECE)  # pieces of a query tile
        self._kernel = Launcher(combine_spec(config, variant))

    def launch(
        self,
        plan: Plan,
        partials: Fixed,
        answer: Answer,
    ) -> None:
        """Write the outputs of split groups, and (0, -inf) for padding; T > 0."""
        rows, tokens = plan.num_rows, plan.num_tokens
        joins = most_joins(self.config, self.variant, self.parts, rows, tokens)
        workers = max(min(self.workers // joins, self.pieces), 1)
        (out, lse), strides = answer, answer.out.stride()
        self._kernel(
            (joins + -(-tokens // workers), workers, 1),
            strides,
            plan.joins,
            plan.is_padding,
            partials,
            (out, *strides[:2]),
            lse,
            *lse.stride(),
            joins,
            tokens,
            self.config.num_heads,
        )


def combine_spec(config: MlaConfig, variant: AttendVariant) -> KernelSpec:
    """Return the kernel that combines the partial results of an attend kernel."""
    overlaps = variant.family != PORTABLE
    types = {
        "joins_ptr": "*i32",
        "is_padding_ptr": "*i8",
        "partials": Partials(pointer(partial_dtype(config, variant)), "*fp32"),
        "out": Lines(pointer(config.dtype), STRIDE, STRIDE),
        "lse_ptr": "*fp32",
    }
    constants = {
        "R": config.kv_lora_rank,
        "PLACES": 1 if config.batch_invariant else 2,
        "OVERLAP": overlaps,
    }
    options = {"num_warps": _NUM_WARPS, "maxnreg": _MAX_REGISTERS} | overlap_options(overlaps)
    return KernelSpec(combine_kernel, constants, types, options)


def _least_lanes(config: MlaConfig, variant: AttendVariant) -> int:
    """Return a lower bound of a plan's lanes: the most that one token's query tiles fill."""
    fills = (1 << step for step in reversed(range(variant.lane_steps + 1)))
    return next(n for n in fills if n == 1 or config.num_heads % (n * variant.tile_m) == 0)
