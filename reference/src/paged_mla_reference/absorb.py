"""Absorbed and materialised attention are one function of the same weights (S-5).

The materialised form up-projects each latent into a key and a value per head. The absorbed
form moves both projections to the query's side, so that the cached latent is attended to
as it is; it is what every other module computes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def absorb_queries(q: Array, w_uk: Array) -> Array:
    """Return absorbed queries ``q_nope``, float64 [T, H, R].

    Parameters
    ----------
    q : float64 [T, H, N]
        The part of the query that is not rotated.
    w_uk : float64 [H, N, R]
        Up-projection of latents to keys.
    """
    q_nope: Array = np.einsum("thn,hnr->thr", q, w_uk)
    return q_nope


def project_values(out: Array, w_uv: Array) -> Array:
    """Return the heads' outputs, float64 [T, H, V], from absorbed ones [T, H, R].

    Parameters
    ----------
    out : float64 [T, H, R]
        Weighted means of latents.
    w_uv : float64 [H, V, R]
        Up-projection of latents to values.
    """
    projected: Array = np.einsum("thr,hvr->thv", out, w_uv)
    return projected


def attend_materialised(
    q: Array,
    q_pe: Array,
    keys: tuple[Array, Array],
    values: Array,
    visible: NDArray[np.bool_],
    *,
    softmax_scale: float,
) -> tuple[Array, Array]:
    """Attend in the form of the paper: one key and one value per head (S-5).

    Parameters
    ----------
    q, q_pe : float64 [T, H, N] and [T, H, P]
    keys : float64 [K, H, N] and [K, P]
        Up-projected keys (:func:`materialise_keys`) and the rotated key all heads share.
    values : float64 [K, H, V]
    visible : bool [T, K]
        Every query sees at least one key.
    softmax_scale : float
        ``(N + P) ** -0.5`` times the squared yarn mscale: this form is what fixes it.

    Returns
    -------
    out : float64 [T, H, V]
    lse : float64 [T, H]

    Notes
    -----
    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1.
    """
    k, k_pe = keys
    scores = np.einsum("thn,khn->thk", q, k) + np.einsum("thp,kp->thk", q_pe, k_pe)
    scores = np.where(visible[:, None, :], softmax_scale * scores, -np.inf)  # [T, H, K]
    highest = scores.max(axis=2, keepdims=True)  # [T, H, 1]
    weights = np.exp(scores - highest)  # [T, H, K]
    total = weights.sum(axis=2)  # [T, H]
    out = np.einsum("thk,khv->thv", weights, values) / total[..., None]
    return out, highest[..., 0] + np.log(total)


def materialise_keys(ckv: Array, w_uk: Array) -> Array:
    """Return one key per head, float64 [K, H, N], from latents [K, R]."""
    keys: Array = np.einsum("kr,hnr->khn", ckv, w_uk)
    return keys


def materialise_values(ckv: Array, w_uv: Array) -> Array:
    """Return one value per head, float64 [K, H, V], from latents [K, R]."""
    values: Array = np.einsum("kr,hvr->khv", ckv, w_uv)
    return values
