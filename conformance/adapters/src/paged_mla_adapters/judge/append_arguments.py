"""The arguments of a function that writes tokens to a cache, by role."""

from __future__ import annotations

import torch

from paged_mla_adapters.call import AppendCall
from paged_mla_adapters.judge.arguments import CacheArguments
from paged_mla_adapters.judge.claims import Claims


class AppendArguments(CacheArguments):
    """The values of the roles in a call of a function that writes tokens to a cache.

    Parameters
    ----------
    call : AppendCall
    claims : Claims
    """

    def __init__(self, call: AppendCall, claims: Claims) -> None:
        super().__init__(call, claims)
        self._call = call

    def _ckv(self) -> torch.Tensor:
        return self._call.ckv

    def _k_pe(self) -> torch.Tensor:
        return self._call.k_pe

    def _latents(self) -> torch.Tensor:
        return torch.cat([self._call.ckv, self._call.k_pe], -1)

    def _slot_mapping(self) -> torch.Tensor:
        return self._call.slot_mapping
