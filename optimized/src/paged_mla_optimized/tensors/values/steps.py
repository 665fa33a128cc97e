"""Check a step's values on the host against the rules; for debugging, since it synchronizes."""

from __future__ import annotations

import numpy as np
import torch

from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.tensors.latent_cache import LatentCache
from paged_mla_optimized.tensors.step import MlaStep, RequestMap
from paged_mla_optimized.tensors.values.blocks import Paging, Table, table_of_map
from paged_mla_optimized.tensors.values.lengths import check_lengths, check_mask
from paged_mla_optimized.tensors.values.scales import check_scales_read


def check_step_values(
    config: MlaConfig,
    step: MlaStep,
    *,
    slot_mapping: torch.Tensor | None = None,
    num_blocks: int | None = None,
    cache: LatentCache | None = None,
    paging: Paging | None = None,
) -> None:
    """Raise ``InvalidArgument`` if a step breaks a rule; shapes and dtypes are not checked.

    Parameters
    ----------
    config : MlaConfig
    step : MlaStep
        The step; its tensors may be on any device.
    slot_mapping : int64 [T] or None
        As for :meth:`PagedMla.append`.
    num_blocks : int or None
        Blocks of the cache; with ``None``, block numbers have no upper limit.
    cache : LatentCache or None
        A cache whose scales are checked for the tokens that were cached before this step.
    paging : Paging or None
        The paging, if it is not the config's.
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
