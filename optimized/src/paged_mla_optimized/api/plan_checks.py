"""Check a planned step's values on the host; for debugging, since the host waits for the device."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.values.blocks import Paging, Table
from paged_mla_optimized.tensors.values.scales import check_scales_read


def check_appended(
    config: MlaConfig,
    plan: Plan,
    cache: LatentCache,
    slot_mapping: torch.Tensor | None,
    *,
    writes_planned_slots: bool,
) -> None:
    """Raise ``InvalidArgument`` if the planned step's writes or cached tokens break a rule.

    Parameters
    ----------
    config : MlaConfig
    plan : Plan
        The plan of the step.
    cache : LatentCache
    slot_mapping : int64 [T] or None
        The caller's slots; ``None`` means the plan's slots, which are not checked here.
    writes_planned_slots : bool
        False after :meth:`Planner.writes_elsewhere`. The plan then determines neither the slots
        that are written nor the tokens that are cached already.
    """
    table, query_lens, lens = _planned(config, plan)
    table.check(cache.latents.shape[0])
    if slot_mapping is not None and writes_planned_slots:
        table.check_slots(slot_mapping.cpu().numpy(), cache.latents.shape[0])
    contexts = np.maximum(lens - query_lens, 0) if writes_planned_slots else np.zeros_like(lens)
    check_scales_read(config, cache, table, contexts)


def check_attended(config: MlaConfig, plan: Plan, cache: LatentCache) -> None:
    """Raise ``InvalidArgument`` if the planned step reads blocks or scales that break a rule."""
    table, _, lens = _planned(config, plan)
    table.check(cache.latents.shape[0])
    check_scales_read(config, cache, table, lens)


def _planned(config: MlaConfig, plan: Plan) -> tuple[Table, NDArray[np.int64], NDArray[np.int32]]:
    """Return the table, the query_lens and the seq_lens of a planned step."""
    starts = plan.token_starts[: plan.num_rows + 1].cpu().numpy()
    lens = plan.row_lens[: plan.num_rows].cpu().numpy()
    query_lens = np.diff(starts).astype(np.int64)
    table = plan.block_table.cpu().numpy()
    return Table(Paging.of(config), query_lens, lens, table), query_lens, lens
