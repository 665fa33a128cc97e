"""What a function that merges two partial answers is given, by role."""

from __future__ import annotations

import torch

from paged_mla_adapters.judge.arguments import Arguments
from paged_mla_adapters.judge.claims import Claims


class MergeArguments(Arguments):
    """Values of the roles in a call of a function that merges two partial answers.

    Parameters
    ----------
    first, second : (float32 [T, H, R], float32 [T, H])
        Outputs and their lse.
    claims : Claims
    """

    def __init__(
        self,
        first: tuple[torch.Tensor, torch.Tensor],
        second: tuple[torch.Tensor, torch.Tensor],
        claims: Claims,
    ) -> None:
        super().__init__()
        for name, (out, lse) in {"a": first, "b": second}.items():
            by_heads = claims.lse_layout == "[H, T]"
            self._made[f"out_{name}"] = out
            self._made[f"lse_{name}"] = lse.T.contiguous() if by_heads else lse

    def _out(self) -> torch.Tensor:
        return torch.full_like(self._made["out_a"], torch.nan)

    def _lse(self) -> torch.Tensor:
        return torch.full_like(self._made["lse_a"], torch.nan)
