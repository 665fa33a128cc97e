"""Small steps as SGLang holds them: a pool of slots, a map of requests, uncached new tokens."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from mla_step import P, R, Step

SPARE = 2  # lines of the map before the first request: 0 is nobody's
CONTEXTS = ("get_exec", "get_memory", "get_parallel", "get_schedule", "get_spec")
"""Functions of SGLang that return parts of what it runs in."""


def context(**changes: Any) -> SimpleNamespace:
    """Return what the backend reads of all parts, for a server of small steps."""
    plain = {
        "attn_cp_size": 1,
        "attn_tp_size": 1,
        "chunked_prefill_size": 32,
        "dcp_enabled": False,
        "deterministic": SimpleNamespace(enable_deterministic_inference=False),
        "disable_radix_cache": False,
        "enable_dynamic_chunking": False,
        "graph": SimpleNamespace(cuda_graph_config=None),
        "max_prefill_tokens": 64,
        "pp_size": 1,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
    }
    return SimpleNamespace(**plain | changes)


@dataclass
class Held:
    """A step whose pool has a block more, the first: that of slot 0."""

    req_to_token: torch.Tensor  # int32 [requests, tokens]
    request_ids: torch.Tensor  # int64 [B]
    pool: torch.Tensor  # [S, 1, R + P]; NaN where nothing is cached, this step's tokens too
    latents: torch.Tensor  # [T, R]
    keys: torch.Tensor  # [T, P]
    out_cache_loc: torch.Tensor  # int64 [T]

    @property
    def new(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.latents, self.keys, self.out_cache_loc


def hold(step: Step) -> Held:
    """Return a step's cache as SGLang has it; rows of length 0 take line 0 and slot 0."""
    size, tokens = step.config.block_size, step.config.max_model_len
    req_to_token = torch.zeros(SPARE + len(step.rows), tokens, dtype=torch.int32)
    pool = torch.cat([torch.zeros(size, 1, R + P), step.cache.view(-1, 1, R + P)])
    new, where = [], []
    for row, (seq_len, query_len) in enumerate(step.rows):
        position = torch.arange(seq_len)
        slots = (step.block_table[row, position // size] + 1) * size + position % size
        req_to_token[SPARE + row, :seq_len] = slots
        first = seq_len - query_len
        new.append(step.keys[row][first:])
        where.append(slots[first:])
        pool[slots[first:].long()] = torch.nan
    joined = torch.cat(new)
    ids = [SPARE + row if seq_len else 0 for row, (seq_len, _) in enumerate(step.rows)]
    return Held(
        req_to_token,
        torch.tensor(ids),
        pool,
        joined[:, :R],
        joined[:, R:],
        torch.cat(where).long(),
    )
