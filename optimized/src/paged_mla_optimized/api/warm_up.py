"""Launch a step of padding for each kernel of an instance, so that the kernel is compiled.

A padded row has no keys and a padded token has no slot (S-6), so these steps neither read nor write
the cache.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_optimized.api.core import Core
from paged_mla_optimized.api.planned import READERS
from paged_mla_optimized.config.arguments import check_kind
from paged_mla_optimized.planning.plan import Plan
from paged_mla_optimized.tensors.latent_cache import Cache
from paged_mla_optimized.tensors.masks import mask_buffer
from paged_mla_optimized.tensors.queries import Answer, Queries
from paged_mla_optimized.tensors.step import MlaStep, RequestMap


def warm_up(core: Core, cache: Cache, request_map: RequestMap | None) -> None:
    """Launch every kernel of plan, append, attend and readers; the planned step stays valid."""
    if request_map is not None:
        check_kind("request_map", request_map, RequestMap)
        check_kind("request_ids", request_map.request_ids, torch.Tensor)
    plan, config = core.new_plan(), core.config
    for query_len in core.query_lens():
        _plan(core, plan, request_map, num_rows=1, num_tokens=1, query_len=query_len)
        queries = Queries(
            _zeros(core, 1, config.num_heads, config.kv_lora_rank),
            _zeros(core, 1, config.num_heads, config.qk_rope_head_dim),
        )
        out = torch.empty_like(queries.nope)
        lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        core.attend(plan, queries, cache, Answer(out, lse))
    for kind in READERS:
        core.reader(kind).warm_up(plan, core.as_cache(cache))
    for num_tokens, num_rows in core.append_steps():
        slots = None
        if num_rows == 0:
            slots = torch.full((num_tokens,), -1, dtype=torch.int64, device=core.device)
        rows = max(num_rows, 1)
        _plan(core, plan, request_map, num_rows=rows, num_tokens=num_tokens, query_len=1)
        core.append(plan, *_latents(core, num_tokens), cache, slots)


def _plan(
    core: Core,
    plan: Plan,
    request_map: RequestMap | None,
    *,
    num_rows: int,
    num_tokens: int,
    query_len: int,
) -> None:
    """Plan a step of padded rows and tokens with the kernel for a query length."""
    as_small = replace(core.config, max_query_tokens=num_tokens, max_model_len=1)
    lengths = torch.zeros(num_rows + 1, dtype=torch.int32, device=core.device)
    table: torch.Tensor | RequestMap = lengths.new_zeros((num_rows, 1))
    if request_map is not None:
        ids = request_map.request_ids.new_zeros(num_rows)
        table = RequestMap(request_map.req_to_token, ids)
    mask = mask_buffer(as_small, core.device)
    step = MlaStep(lengths, lengths[:num_rows], table, num_tokens=num_tokens, mask=mask)
    core.fill(plan, step, max_query_len=query_len)


def _latents(core: Core, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return zeros as the latents and the rotated keys of `num_tokens` tokens."""
    config = core.config
    return (
        _zeros(core, num_tokens, config.kv_lora_rank),
        _zeros(core, num_tokens, config.qk_rope_head_dim),
    )


def _zeros(core: Core, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=core.config.dtype, device=core.device)
