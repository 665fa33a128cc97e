"""Prefill of SGLang's steps over per-head keys and values. This file imports no SGLang."""

from __future__ import annotations

from dataclasses import replace

import torch

from paged_mla_optimized.config.prefill import PrefillConfig
from paged_mla_optimized.engines.heads import HeadsPrefill
from paged_mla_optimized.engines.sglang.convert import starts_of


class Prompts:
    """Attention of new tokens over the new keys, over all keys of their rows, or over a chunk.

    SGLang projects keys and values, gathers the cached tokens, and merges the partial results of
    chunks.

    Parameters
    ----------
    config : PrefillConfig
        A causal configuration.
    """

    def __init__(self, config: PrefillConfig) -> None:
        self._new = HeadsPrefill(config)
        self._chunks = HeadsPrefill(replace(config, causal=False))
        self._starts = self._key_starts = torch.empty(0)

    def begin(self, extend_seq_lens: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Start a step.

        Parameters
        ----------
        extend_seq_lens : int [B]
            The number of new tokens of each row.
        seq_lens : int [B]
            The number of all tokens of each row, cached and new.
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
        """Compute the attention of one layer's new tokens.

        Parameters
        ----------
        q : dtype [T, H, N + P]
        k : dtype [K, H, N + P]
        v : dtype [K, H, V]
        chunk : (int, int32 [chunks, B + 1]) or None
            If `k` and `v` are a chunk of the cached tokens: the number of the chunk, and the prefix
            sums of the key lengths of all chunks.
        with_prefix : bool
            Whether `k` and `v` contain the cached tokens of each row before its new tokens. It is
            not read if there is a `chunk`.

        Returns
        -------
        out : dtype [T, H, V]
        lse : float32 [T, H]
            The natural lse, which SGLang merges.
        """
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        if chunk is not None:
            number, sums = chunk
            heads, part, keys = self._chunks, number, sums[number]
        else:
            heads, part = self._new, int(with_prefix)
            keys = self._key_starts if with_prefix else self._starts
        return heads.attend(part, self._starts, keys, q=q, k=k, v=v, lse=lse), lse
