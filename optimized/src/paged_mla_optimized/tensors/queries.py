"""The tensors that are passed together: the queries of a step, and its outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """The queries of a step.

    Parameters
    ----------
    nope : dtype [T, H, R], or [T, H, N]
        The part without position: absorbed (R) or per head (N).
    pe : dtype [T, H, P]
        The part with position, which is rotated.
    """

    nope: torch.Tensor
    pe: torch.Tensor


class Answer(NamedTuple):
    """The tensors that receive the output and ``lse`` of a step.

    Parameters
    ----------
    out : dtype [T, H, R], or [T, H, V]
    lse : float32 [T, H]
    """

    out: torch.Tensor
    lse: torch.Tensor

    def scale_lse(self, unit: float) -> None:
        """Multiply ``lse`` in place, also if it requires gradients or is an inference tensor."""
        with torch.inference_mode():
            self.lse.mul_(unit)
