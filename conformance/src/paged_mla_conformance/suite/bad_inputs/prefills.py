"""Illegal prefills with the argument that is wrong; each differs little from a legal one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from paged_mla_conformance.suite.bad_inputs.steps import Bad, put
from paged_mla_shared.cases import PREFILLS
from paged_mla_shared.prefill import PrefillBatch

[BASE] = [case for case in PREFILLS if case.name == "padding"]


BadPrefill = Bad[PrefillBatch]


def _bad(name: str, argument: str, change: Callable[[Any], Any], says: str = "") -> BadPrefill:
    """Return a batch with one changed array; the error may name another array, `says`."""

    def spoil(batch: PrefillBatch) -> PrefillBatch:
        return replace(batch, **{argument: change(getattr(batch, argument))})

    return BadPrefill(name, says or argument, spoil)


CAPACITIES = {
    "max_rows": ("max_rows", 1),
    "max_query_tokens": ("max_query_tokens", 78),
    "max_model_len": ("cu_seqlens_k", 69),
}
"""Capacities that the base exceeds by one, each with the argument that the error names."""

BAD_PREFILLS = (
    _bad("q-nope-dtype", "q_nope", lambda a: a.astype(np.float64)),
    _bad("q-nope-heads", "q_nope", lambda a: a[:, :-1]),
    _bad("q-nope-width", "q_nope", lambda a: a[..., :-1]),
    _bad("q-pe-tokens", "q_pe", lambda a: a[:-1], "q_pe|q_nope"),
    _bad("q-pe-width", "q_pe", lambda a: a[..., :-1]),
    _bad("k-nope-width", "k_nope", lambda a: a[..., :-1]),
    _bad("k-nope-tokens", "k_nope", lambda a: a[:-1], "k_nope|k_pe|v"),
    _bad("k-pe-of-every-head", "k_pe", lambda a: np.stack([a, a], axis=1)),
    _bad("k-pe-dtype", "k_pe", lambda a: a.astype(np.float64)),
    _bad("v-width", "v", lambda a: a[..., :-1]),
    _bad("v-heads", "v", lambda a: a[:, :-1]),
    _bad("cu-q-int64", "cu_seqlens_q", lambda a: a.astype(np.int64)),
    _bad("cu-q-decreasing", "cu_seqlens_q", put(1, 13)),
    _bad("cu-q-past-tokens", "cu_seqlens_q", put(-1, 80)),
    _bad("cu-q-not-from-0", "cu_seqlens_q", put(0, 1)),
    _bad("cu-k-int64", "cu_seqlens_k", lambda a: a.astype(np.int64)),
    _bad("cu-k-fewer-rows", "cu_seqlens_k", lambda a: a[:-1], "cu_seqlens_k|cu_seqlens_q"),
    _bad("cu-k-decreasing", "cu_seqlens_k", put(1, 80)),
    _bad("cu-k-past-keys", "cu_seqlens_k", put(-1, 150)),
    _bad("cu-k-not-from-0", "cu_seqlens_k", put(0, 1)),
)
