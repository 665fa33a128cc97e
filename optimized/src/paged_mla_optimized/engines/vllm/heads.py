"""Prefill rows of vLLM's steps, over keys and values of every head: no vLLM here."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paged_mla_optimized.prefill import Prefill, PrefillConfig


class HeadsPrefill:
    """A :class:`~paged_mla_optimized.prefill.Prefill` that is fed as vLLM feeds a prefill backend.

    All layers of a step give the same lengths: what has been planned for one serves the others.

    vLLM makes one for each layer and uses the first: buffers are allocated by the first call.

    Parameters
    ----------
    config : PrefillConfig
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self._prefill: Prefill | None = None
        self._planned: Hashable = None

    def forget(self) -> None:
        """Let the next call plan: a new step begins."""
        self._planned = None

    def attend(
        self,
        part: Hashable,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend a part of a step.

        Parameters
        ----------
        part : hashable
            Tells the parts of a step apart; not ``None``.
        cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        q : dtype [T, H, N + P]
        k : dtype [K, H, N + P]
            vLLM copies what depends on position to every head; that of the first is read.
        v : dtype [K, H, V]

        Returns
        -------
        out : dtype [T, H, V]
        lse : float32 [H, T]
            As vLLM merges it: natural, ``-inf`` for rows without keys.
        """
        tokens, num_heads, _ = q.shape
        if self._prefill is None:
            self._prefill = Prefill(self.config, q.device)
        if part != self._planned:
            self._prefill.plan(cu_seqlens_q, cu_seqlens_k, num_tokens=tokens)
            self._planned = part
        nope = self.config.qk_nope_head_dim
        lse = q.new_empty((num_heads, tokens), dtype=torch.float32)
        out, _ = self._prefill.attend(
            q[..., :nope], q[..., nope:], k[..., :nope], k[:, 0, nope:], v, lse=lse.t()
        )
        return out, lse
