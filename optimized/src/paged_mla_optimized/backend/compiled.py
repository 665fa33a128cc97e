"""Run steps under ``torch.compile``; each call of the protocol is one graph without breaks."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.backend.places import OwnAllocations, PlacesOf
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.triton_compat.interpreter import is_interpreting
from paged_mla_shared.problem import Problem

_MAX_GRAPHS = 64  # graphs of one call, for different shapes; torch's default of 8 is too low


class CompiledRunner(EagerRunner):
    """A runner whose graphs of append and attend also plan, so their ops depend on a plan op."""

    def __init__(
        self,
        problem: Problem,
        config: MlaConfig,
        device: str,
        places_of: PlacesOf = OwnAllocations,
    ) -> None:
        super().__init__(problem, config, device, places_of)
        torch.compiler.reset()  # the limit also counts graphs of earlier instances

    def _plan(self, tensors: dict[str, torch.Tensor]) -> None:
        _compiled(super()._plan, tensors)

    def _append(self, tensors: dict[str, torch.Tensor]) -> None:
        def step(tensors: dict[str, torch.Tensor]) -> None:
            plan(tensors)
            append(tensors)

        plan, append = super()._plan, super()._append
        _compiled(step, tensors)

    def _attend(
        self, tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor
    ) -> None:
        def step(tensors: dict[str, torch.Tensor], out: torch.Tensor, lse: torch.Tensor) -> None:
            plan(tensors)
            attend(tensors, out, lse)

        plan, attend = super()._plan, super()._attend
        _compiled(step, tensors, out, lse)


def _compiled(
    step: Callable[..., None], tensors: dict[str, torch.Tensor], *answers: torch.Tensor
) -> None:
    """Run `step` as one graph, which is compiled at the first inputs of a kind."""
    # The interpreter runs on the host, for which Inductor would need a C++ compiler.
    backend = "aot_eager" if is_interpreting() else "inductor"
    with (
        warnings.catch_warnings(),
        torch._dynamo.config.patch(recompile_limit=_MAX_GRAPHS),
        # Graphs of these ops have hardly any kernels; without this, each process starts a pool.
        torch._inductor.config.patch(compile_threads=1),
    ):
        warnings.simplefilter("default")  # torch's compilers call deprecated functions
        torch.compile(step, fullgraph=True, backend=backend)(tensors, *answers)
