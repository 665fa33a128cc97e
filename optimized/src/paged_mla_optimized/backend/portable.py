"""Run steps on the portable kernels, on any GPU."""

from __future__ import annotations

import torch

from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.backend.eager import EagerRunner
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.choice import demand_of, step_query_len
from paged_mla_optimized.planning.families import portable_variant
from paged_mla_optimized.runtime.device import device_facts


class PortableRunner(EagerRunner):
    """A runner in which every step gets the portable variant for full capacities."""

    def _instance(self, config: MlaConfig, device: str) -> PagedMla:
        demand = demand_of(config, device_facts(torch.device(device)).arch)
        query_len = step_query_len(config, config.max_rows, config.max_query_tokens, None)
        return PagedMla(config, device, variant=portable_variant(demand, query_len))

    def _prefill_of(self, causal: bool) -> Prefill:  # noqa: FBT001 - a field of the batch
        prefill = super()._prefill_of(causal)
        prefill._hopper = None  # the portable kernel supports every tensor, with the same plan
        return prefill
