"""Prefill rows of an engine's steps, over keys and values of every head: no engine here."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig


class Keys(NamedTuple):
    """Keys of heads as a projection leaves them, and their part with position once for all.

    Parameters
    ----------
    nope : dtype [K, H, N]
    pe : dtype [K, 1, P]
    """

    nope: torch.Tensor
    pe: torch.Tensor


@cache
def warm_up(config: PrefillConfig, device: torch.device) -> None:
    """Compile what prompts launch, once for all layers of a model, and not while one waits."""
    Prefill(config, device).warm_up()


class HeadsPrefill:
    """A :class:`~paged_mla_optimized.api.prefill.Prefill` with the calls of engines' backends.

    All layers of a step give the same lengths: what has been planned for one serves the others, in
    a plan for each part. Buffers are allocated by the first call of a part: an engine may make
    more of these than it uses.

    Parameters
    ----------
    config : PrefillConfig
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self._prefills: dict[Hashable, Prefill] = {}  # by part
        self._planned: set[Hashable] = set()

    def forget(self) -> None:
        """Let the next calls plan: a new step begins."""
        self._planned.clear()

    def attend(
        self,
        part: Hashable,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        *,
        q: torch.Tensor,
        k: torch.Tensor | Keys,
        v: torch.Tensor,
        lse: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend a part of a step.

        Parameters
        ----------
        part : hashable
            Tells the parts of a step apart.
        cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
        q : dtype [T, H, N + P]
        k : Keys, or dtype [K, H, N + P]
            Where an engine has copied what depends on position to every head, that of the first is
            read.
        v : dtype [K, H, V]
        lse : float32 [T, H]
            Where to write it: natural, ``-inf`` for rows without keys. Any strides.
        out : dtype [T, H, V] or None
            Where to write; ``None`` allocates.

        Returns
        -------
        out : dtype [T, H, V]
        """
        if part not in self._prefills:
            self._prefills[part] = Prefill(self.config, q.device)
        prefill = self._prefills[part]
        if part not in self._planned:
            prefill.plan(cu_seqlens_q, cu_seqlens_k, num_tokens=len(q))
            self._planned.add(part)
        nope = self.config.qk_nope_head_dim
        keys = k if isinstance(k, Keys) else Keys(k[..., :nope], k[:, :1, nope:])
        out, _ = prefill.attend(
            q[..., :nope], q[..., nope:], keys.nope, keys.pe[:, 0], v, out=out, lse=lse
        )
        return out
