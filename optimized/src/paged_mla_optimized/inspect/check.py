"""A step's values on the host, held against the rules; for debugging, since it synchronises."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_optimized.cache import LatentCache
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.inspect.blocks import Paging, Table, table_of_map
from paged_mla_optimized.inspect.scales import check_scales_read
from paged_mla_optimized.inspect.values import check_lengths, check_mask
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.step import MlaStep, RequestMap


def check_step_values(
    config: MlaConfig,
    step: MlaStep,
    *,
    slot_mapping: torch.Tensor | None = None,
    num_blocks: int | None = None,
    cache: LatentCache | None = None,
    paging: Paging | None = None,
) -> None:
    """Raise ``InvalidArgument`` if a step breaks a rule; shapes and dtypes are right already.

    Parameters
    ----------
    config : MlaConfig
    step : MlaStep
        Its tensors are on any device.
    slot_mapping : int64 [T] or None
        As for :meth:`PagedMla.append`.
    num_blocks : int or None
        Of the cache; ``None`` where it is not known: no block is too large then.
    cache : LatentCache or None
        Its scales of the tokens that were cached before this step are looked at.
    paging : Paging or None
        Where it is another than the config's.
    """
    lens = step.seq_lens.cpu().numpy()
    if isinstance(step.block_table, RequestMap):
        blocks = table_of_map(config, step.block_table, lens)
    else:
        blocks = step.block_table.cpu().numpy()
    query_lens = check_lengths(config, step.cu_seqlens_q.cpu().numpy(), lens, step.num_tokens)
    table = Table(paging or Paging.of(config), query_lens, lens, blocks)
    table.check(num_blocks)
    if step.mask is not None:
        check_mask(config, query_lens, lens, step.mask.cpu().numpy())
    if slot_mapping is None:
        table.check_planned_slots()
    else:
        table.check_slots(slot_mapping.cpu().numpy(), num_blocks)
    if cache is not None:
        check_scales_read(config, cache, table, np.maximum(lens - query_lens, 0))


def check_appended(
    config: MlaConfig,
    plan: Plan,
    cache: LatentCache,
    slot_mapping: torch.Tensor | None,
    *,
    writes_planned_slots: bool,
) -> None:
    """Raise ``InvalidArgument`` if the planned step writes or keeps what no rule allows.

    Parameters
    ----------
    config : MlaConfig
    plan : Plan
        Of the step.
    cache : LatentCache
    slot_mapping : int64 [T] or None
        Named slots; ``None`` takes the plan's.
    writes_planned_slots : bool
        False where the plan's rows are not those that tokens are written for: they say nothing of
        slots, or of what is cached already.
    """
    table, query_lens, lens = _planned(config, plan)
    table.check(cache.latents.shape[0])
    if slot_mapping is not None and writes_planned_slots:
        table.check_slots(slot_mapping.cpu().numpy(), cache.latents.shape[0])
    contexts = np.maximum(lens - query_lens, 0) if writes_planned_slots else np.zeros_like(lens)
    check_scales_read(config, cache, table, contexts)


def check_attended(config: MlaConfig, plan: Plan, cache: LatentCache) -> None:
    """Raise ``InvalidArgument`` if the planned step reads blocks or scales that no rule allows."""
    table, _, lens = _planned(config, plan)
    table.check(cache.latents.shape[0])
    check_scales_read(config, cache, table, lens)


def _planned(config: MlaConfig, plan: Plan) -> tuple[Table, NDArray[np.int64], NDArray[np.int32]]:
    """Return the table of a planned step, and its query_lens and seq_lens."""
    starts = plan.token_starts[: plan.num_rows + 1].cpu().numpy()
    lens = plan.row_lens[: plan.num_rows].cpu().numpy()
    query_lens = np.diff(starts).astype(np.int64)
    table = plan.block_table.cpu().numpy()
    return Table(Paging.of(config), query_lens, lens, table), query_lens, lens
