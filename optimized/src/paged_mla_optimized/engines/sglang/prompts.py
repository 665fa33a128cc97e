"""Prompts of SGLang's steps, over keys and values of every head: no SGLang here."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.engines.heads import HeadsPrefill
from paged_mla_optimized.engines.sglang.convert import starts_of


class Prompts:
    """Attends new tokens to each other, to all of their rows, or to chunks of what is cached.

    SGLang projects, gathers what is cached, and merges chunks.

    Parameters
    ----------
    config : PrefillConfig
        Causal.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self._new = HeadsPrefill(config)
        self._chunks = HeadsPrefill(replace(config, causal=False))
        self._starts = self._key_starts = torch.empty(0)

    def begin(self, extend_seq_lens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Begin a step.

        Parameters
        ----------
        extend_seq_lens : int [B]
            New tokens.
        seq_lens : int [B]
            With what is cached.
        """
        self._starts, self._key_starts = starts_of(extend_seq_lens), starts_of(seq_lens)
        self._new.forget()
        self._chunks.forget()

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        chunk: tuple[int, torch.Tensor] | None,
        with_prefix: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend one layer's new tokens.

        Parameters
        ----------
        q : dtype [T, H, N + P]
        k : dtype [K, H, N + P]
        v : dtype [K, H, V]
        chunk : (int, int32 [chunks, B + 1]) or None
            `k` and `v` are those of a chunk of what is cached, of this number; prefix sums.
        with_prefix : bool
            `k` and `v` begin with what is cached, in each row.

        Returns
        -------
        out : dtype [T, H, V]
        lse : float32 [T, H]
            Natural, as SGLang merges it.
        """
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        if chunk is not None:
            number, sums = chunk
            heads, part, keys = self._chunks, number, sums[number]
        else:
            heads, part = self._new, int(with_prefix)
            keys = self._key_starts if with_prefix else self._starts
        return heads.attend(part, self._starts, keys, q=q, k=k, v=v, lse=lse), lse
