"""Launch attention over a fixed grid, and combine the partial results of split groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.kernels.common.token_head import Partials
from paged_mla_optimized.operations.argument_types import partial_dtype
from paged_mla_optimized.operations.attend.combine import Combine
from paged_mla_optimized.operations.attend.hopper import HopperAttention
from paged_mla_optimized.operations.attend.portable import PortableAttention
from paged_mla_optimized.operations.queries.quantize import QuantizeQueries
from paged_mla_optimized.operations.queries.rotate import RotateQueries
from paged_mla_optimized.planning.families import PORTABLE, AttendVariant, fixed_splits
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.runtime.launch import Fixed
from paged_mla_optimized.tensors.checks import check_tensor
from paged_mla_optimized.tensors.latent_cache import LatentCache, scales_and_stride
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_shared.errors import InvalidArgument


class Workspace:
    """Memory for partial results between two kernel launches; all variants share it.

    Parameters
    ----------
    config : MlaConfig
    variants : sequence of AttendVariant
    num_sms : int
        Multiprocessors of the device.
    device : torch.device
    given : float32 [n] or None
        Memory to use; ``None`` allocates memory.

    Raises
    ------
    InvalidArgument
        `given` is too small, or its dtype, device or stride is wrong.
    """

    def __init__(
        self,
        config: MlaConfig,
        variants: list[AttendVariant],
        num_sms: int,
        device: torch.device,
        given: torch.Tensor | None,
    ) -> None:
        self._config = config
        self._shapes = {v: partial_shape(config, v, num_sms) for v in variants}
        size = max(map(math.prod, self._shapes.values())) * (config.kv_lora_rank + 1)
        if given is None:
            given = torch.empty(size, dtype=torch.float32, device=device)
        check_tensor("workspace", given, (None,), torch.float32, device, unit_stride=True)
        if len(given) < size:
            raise InvalidArgument("workspace", f"{len(given)} floats", f"at least {size}")
        self.memory = given

    def partials(self, variant: AttendVariant) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``partial_out`` [tiles, tile_m, R] and ``partial_lse`` [tiles, tile_m]."""
        shape = self._shapes[variant]
        rank = self._config.kv_lora_rank
        pairs = math.prod(shape)
        outs = self.memory[: pairs * rank].view(partial_dtype(self._config, variant))
        lses = self.memory[pairs * rank : pairs * (rank + 1)]
        return outs[: pairs * rank].view(*shape, rank), lses.view(shape)


class Attention:
    """The attention launches of steps of one kernel variant.

    Parameters
    ----------
    config : MlaConfig
    variant : AttendVariant
    facts : DeviceFacts
        The facts of the device, whose number of multiprocessors determines the grid.
    workspace : Workspace
    quantize : QuantizeQueries or None
        The quantization; required for a family of FP8 products.
    rotate : RotateQueries or None
        The rotation; required if the config has a rope.
    """

    def __init__(
        self,
        config: MlaConfig,
        variant: AttendVariant,
        facts: DeviceFacts,
        workspace: Workspace,
        *,
        quantize: QuantizeQueries | None = None,
        rotate: RotateQueries | None = None,
    ) -> None:
        programs = variant.programs(facts.num_sms)
        self.partial_out, self.partial_lse = workspace.partials(variant)
        self._partials = Fixed(Partials(self.partial_out, self.partial_lse))
        self._portable = PortableAttention(
            config, variant, arch=facts.arch, programs=programs, rotate=rotate
        )
        self._hopper = None
        if variant.family != PORTABLE:
            self._hopper = HopperAttention(config, variant, programs, quantize, rotate)
        self._combine = Combine(config, variant, programs)

    def launch(
        self,
        plan: Plan,
        queries: Queries,
        cache: LatentCache,
        answer: Answer,
    ) -> None:
        """Write every element of `answer`; the step must have at least one token."""
        self.attend(plan, queries, cache, answer)
        self._combine.launch(plan, self._partials, answer)

    def attend(
        self,
        plan: Plan,
        queries: Queries,
        cache: LatentCache,
        answer: Answer,
    ) -> None:
        """Write the outputs of groups that are not split, and partial results of all others."""
        launch: Callable[..., None] = self._portable.launch
        if self._hopper is not None and self._hopper.takes(queries):
            rows = self._hopper.rows_of(cache.latents, scales_and_stride(cache)[1])
            if rows is not None:
                launch = partial(self._hopper.launch, rows)
        launch(plan, queries, cache, answer, partials=self._partials)


def partial_shape(config: MlaConfig, variant: AttendVariant, num_sms: int) -> tuple[int, int]:
    """Return the maximum number of partial results, and the pairs of a query tile."""
    # Two for each part: for the first and the last group of its range; or for a part's state.
    tiles = 2 * variant.programs(num_sms)
    if config.batch_invariant:
        tiles += config.max_rows * fixed_splits(variant, config.max_rows, config.kv_lora_rank)
    return tiles, variant.tile_m
