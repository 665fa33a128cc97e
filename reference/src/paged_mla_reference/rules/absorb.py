"""Rule S-21: materialized and absorbed attention compute the same function of the same weights.

The materialized form up-projects each latent to a key and a value per head
(:mod:`paged_mla_reference.rules.prefill`). The absorbed form applies both projections to the query
and to the output instead, and attends directly to the cached latents
(:mod:`paged_mla_reference.rules.attention`):
``(q W_UK) . ckv = q . (ckv W_UK)``, and a mean of ``ckv W_UV`` is the mean of ``ckv``, times
``W_UV``. Both forms have the same scores and the same lse.

In 16 bits each form rounds its intermediate results once, to the problem's dtype. The materialized
form rounds ``k_nope`` and ``v``. The absorbed form rounds the absorbed queries and the mean of the
latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.dims import MlaDims

Array = NDArray[np.float64]


@dataclass(frozen=True)
class UpProjection:
    """The weights that project latents to the keys and values of the heads.

    Parameters
    ----------
    w_uk : float [H, N, R]
    w_uv : float [H, V, R]
    """

    w_uk: NDArray[Any]
    w_uv: NDArray[Any]

    @classmethod
    def of_kv_b_proj(cls, weight: NDArray[Any], dims: MlaDims) -> UpProjection:
        """Return the two projections of a checkpoint's weight ``kv_b_proj`` [H * (N + V), R].

        Notes
        -----
        Source: ``DeepseekV3Attention`` in the transformers library. The weight's lines are ordered
        by head; within a head, the key's lines precede the value's.
        """
        nope, rank = dims.qk_nope_head_dim, dims.kv_lora_rank
        heads = weight.reshape(dims.num_heads, nope + dims.v_head_dim, rank)
        return cls(heads[:, :nope], heads[:, nope:])

    def materialize(
        self, ckv: NDArray[Any], dtype: str, rounding: Rounding = Rounding.SPEC
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return ``k_nope`` [K, H, N] and ``v`` [K, H, V] of latents [K, R].

        ``Rounding.SPEC`` rounds both to `dtype`; ``Rounding.EXACT`` returns float64.
        """
        k_nope = np.einsum("kr,hnr->khn", widen(ckv), widen(self.w_uk), optimize=True)
        v = np.einsum("kr,hvr->khv", widen(ckv), widen(self.w_uv), optimize=True)
        return _handed_on(k_nope, dtype, rounding), _handed_on(v, dtype, rounding)

    def absorb(
        self, q: NDArray[Any], dtype: str, rounding: Rounding = Rounding.SPEC
    ) -> NDArray[Any]:
        """Return the absorbed queries [T, H, R] of queries ``q_nope`` [T, H, N].

        ``Rounding.SPEC`` rounds them to `dtype`; ``Rounding.EXACT`` returns float64.
        """
        absorbed = np.einsum("thn,hnr->thr", widen(q), widen(self.w_uk))
        return _handed_on(absorbed, dtype, rounding)

    def project(self, out: NDArray[Any]) -> Array:
        """Return the outputs of the heads, float64 [T, H, V], from means of latents [T, H, R]."""
        projected: Array = np.einsum("thr,hvr->thv", widen(out), widen(self.w_uv))
        return projected


def _handed_on(x: Array, dtype: str, rounding: Rounding) -> NDArray[Any]:
    """Return an intermediate result, which ``Rounding.SPEC`` rounds to `dtype`."""
    return x if rounding is Rounding.EXACT else round_to(x, dtype)
