"""Prefill over per-head keys and values, for all engines. This file imports no engine."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import NamedTuple

import torch

from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.prefill import PrefillConfig


class Keys(NamedTuple):
    """Per-head keys without position, and the rotated key that all heads share.

    Parameters
    ----------
    nope : dtype [K, H, N]
        The part without position, as the projection returns it.
    pe : dtype [K, 1, P]
        The rotated part.
    """

    nope: torch.Tensor
    pe: torch.Tensor


@cache
def warm_up(config: PrefillConfig, device: torch.device) -> None:
    """Compile the kernels that prefill launches, once for all layers of a model.

    The compilation happens before the first request, so no request waits for it.
    """
    Prefill(config, device).warm_up()


class HeadsPrefill:
    """A :class:`~paged_mla_optimized.api.prefill.Prefill` for each part of a step.

    All layers of a step have the same lengths, so the first layer plans each part and the other
    layers reuse the plan. The first call for a part allocates its buffers, because an engine may
    make more instances of this class than it uses.

    Parameters
    ----------
    config : PrefillConfig
    """

    def __init__(self, config: PrefillConfig) -> None:
        self.config = config
        self._prefills: dict[Hashable, Prefill] = {}  # by part
        self._planned: set[Hashable] = set()

    def forget(self) -> None:
        """Start a new step: the next call for each part plans again."""
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
        """Compute the attention of one part of a step.

        Parameters
        ----------
        part : hashable
            The key of this part within the step, for example the number of a context chunk.
        cu_seqlens_q, cu_seqlens_k : int32 [B + 1]
            Prefix sums of the query lengths and of the key lengths. The method reads them only
            when it plans the part.
        q : dtype [T, H, N + P]
        k : Keys, or dtype [K, H, N + P]
            In a joined tensor the rotated part of every head is the same; the method reads it from
            the first head.
        v : dtype [K, H, V]
        lse : float32 [T, H]
            The tensor that receives the natural lse, ``-inf`` for rows without keys. It may have
            any strides.
        out : dtype [T, H, V] or None
            The tensor that receives the output; ``None`` allocates one.

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
