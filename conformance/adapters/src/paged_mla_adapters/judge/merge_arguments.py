"""The arguments of a function that merges two partial results, by role."""

from __future__ import annotations

import torch

from paged_mla_adapters.call import MergeCall
from paged_mla_adapters.judge.arguments import Arguments
from paged_mla_adapters.judge.claims import Claims


class MergeArguments(Arguments):
    """The values of the roles in a call of a function that merges two partial results.

    Parameters
    ----------
    call : MergeCall
    claims : Claims
    """

    def __init__(self, call: MergeCall, claims: Claims) -> None:
        super().__init__()
        self._call = call
        self._made |= {"out_a": call.out_a, "out_b": call.out_b}
        for role, lse in {"lse_a": call.lse_a, "lse_b": call.lse_b}.items():
            self._made[role] = (
                call.room.place(role, lse.T) if claims.lse_layout == "[H, T]" else lse
            )

    def _out(self) -> torch.Tensor:
        return self._call.buffer("the output", tuple(self._call.out_a.shape))

    def _lse(self) -> torch.Tensor:
        return self._call.buffer("the lse", tuple(self._made["lse_a"].shape))
