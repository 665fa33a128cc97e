"""What a function that writes tokens to a cache is given, by role."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_mla_adapters.judge.arguments import CacheArguments
from paged_mla_adapters.judge.claims import Claims
from paged_mla_shared.problem import Problem


@dataclass(frozen=True)
class Written:
    """One launch of a writer: T tokens, T at least 1.

    Parameters
    ----------
    problem : Problem
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        A view, which the call writes.
    ckv : dtype [T, R]
    k_pe : dtype [T, P]
    slot_mapping : int64 [T]
        -1 for tokens that are not stored.
    """

    problem: Problem
    cache: torch.Tensor
    ckv: torch.Tensor
    k_pe: torch.Tensor
    slot_mapping: torch.Tensor


class AppendArguments(CacheArguments):
    """Values of the roles in a call of a function that writes tokens to a cache.

    Parameters
    ----------
    call : Written
    claims : Claims
    """

    def __init__(self, call: Written, claims: Claims) -> None:
        super().__init__(call, claims)
        self._call = call

    def finish(self) -> None:
        """Put what was written to the two halves of a cache into the cache."""
        halves = {"ckv_cache": slice(None, self._rank), "kpe_cache": slice(self._rank, None)}
        for role, columns in halves.items():
            if role in self._made:
                target = self._call.cache[..., columns]
                target.copy_(self._made[role].view(target.shape))

    def _ckv(self) -> torch.Tensor:
        return self._call.ckv

    def _k_pe(self) -> torch.Tensor:
        return self._call.k_pe

    def _latents(self) -> torch.Tensor:
        return torch.cat([self._call.ckv, self._call.k_pe], -1)

    def _slot_mapping(self) -> torch.Tensor:
        return self._call.slot_mapping
