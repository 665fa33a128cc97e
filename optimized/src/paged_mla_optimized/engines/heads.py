"""Prefill rows of an engine's steps, over keys and values of every head: no engine here."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from paged_mla_optimized.prefill import Prefill, PrefillConfig


class HeadsPrefill:
    """A :class:`~paged_mla_optimized.prefill.Prefill` that is fed as engines feed their backends.

    All layers of a step give the same lengths: what has been planned for one serves the others.
    Buffers are allocated by the first call: an engine may make more of these than it uses.

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
        lse: torch.Tensor,
    ) -> torch.Tensor:
        """Attend a part of a step.

        Parameters
        ----------
        part : hashable
            Tells the parts of a step apart; not ``None``.
        cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        q : dtype [T, H, N + P]
        k : dtype [K, H, N + P]
            Engines copy what depends on position to every head; that of the first is read.
        v : dtype [K, H, V]
        lse : float32 [T, H]
            Where to write it: natural, ``-inf`` for rows without keys. Any strides.

        Returns
        -------
        out : dtype [T, H, V]
        """
        if self._prefill is None:
            self._prefill = Prefill(self.config, q.device)
        if part != self._planned:
            self._prefill.plan(cu_seqlens_q, cu_seqlens_k, num_tokens=len(q))
            self._planned = part
        nope = self.config.qk_nope_head_dim
        out, _ = self._prefill.attend(
            q[..., :nope], q[..., nope:], k[..., :nope], k[:, 0, nope:], v, lse=lse
        )
        return out
