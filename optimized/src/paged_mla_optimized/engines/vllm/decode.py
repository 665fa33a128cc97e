"""Decode rows of vLLM's steps: planned by the metadata builder, attended to by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paged_mla_optimized.api import PagedMla
from paged_mla_optimized.config import MlaConfig
from paged_mla_optimized.engines.tensors import as_cache, split_queries
from paged_mla_optimized.engines.vllm.convert import query_len


@dataclass(frozen=True)
class Planned:
    """One planned step, for the metadata that its layers are given."""

    decode: Decode
    number: int

    def attend(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        latents: torch.Tensor,
        k_scale: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend the step's queries to one layer's cache.

        Parameters
        ----------
        q : dtype [T, H, R] and [T, H, P], or both in one [T, H, R + P]
            T counts the padding of a CUDA graph.
        latents, k_scale
            As :func:`~paged_mla_optimized.engines.tensors.as_cache` takes them.

        Returns
        -------
        out : dtype [T, H, R]
        lse : float32 [T, H]
            Natural; ``(0, -inf)`` where nothing is seen, as on a rank that caches no key of a row.

        Raises
        ------
        RuntimeError
            A later step was planned: its buffers have taken the place of this one's.
        """
        latest = self.decode.number
        if self.number != latest:
            raise RuntimeError(f"metadata of step {self.number}, where step {latest} is planned")
        mla = self.decode.mla
        q_nope, q_pe = split_queries(q, mla.config.kv_lora_rank)
        return mla.attend(q_nope, q_pe, as_cache(mla.config.cache_format, latents, k_scale))


class Decode:
    """A :class:`~paged_mla_optimized.api.PagedMla` that is fed as vLLM feeds a backend.

    Parameters
    ----------
    config : MlaConfig
    device : torch.device
    query_lens : sequence of int
        As :func:`~paged_mla_optimized.engines.vllm.convert.query_len` takes them.

    Attributes
    ----------
    mla : PagedMla
    number : int
        Of the latest planned step.
    """

    def __init__(
        self, config: MlaConfig, device: torch.device | str, query_lens: Sequence[int]
    ) -> None:
        self.mla = PagedMla(config, device)
        self._query_lens = query_lens
        self.number = 0

    def plan(
        self,
        *,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        num_tokens: int,
    ) -> Planned:
        """Describe a step, before its graph is captured and again before each replay.

        Parameters
        ----------
        query_start_loc : int32 [B + 1]
        seq_lens : int32 [B]
            This step's tokens included; of this rank's tokens under context parallelism.
        block_table : int32 [B, M]
        num_tokens : int
            Padding included.
        """
        hint = query_len(len(seq_lens), num_tokens, self._query_lens)
        self.mla.plan(
            query_start_loc, seq_lens, block_table, num_tokens=num_tokens, max_query_len=hint
        )
        self.number += 1
        return Planned(self, self.number)
