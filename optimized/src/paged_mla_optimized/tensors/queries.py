"""Tensors that travel together: the queries of a step, and their answers."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Queries(NamedTuple):
    """The queries of a step.

    Parameters
    ----------
    nope : dtype [T, H, R], or [T, H, N]
        The part without position: absorbed, or as heads have it.
    pe : dtype [T, H, P]
        The part that is rotated.
    """

    nope: torch.Tensor
    pe: torch.Tensor


class Answer(NamedTuple):
    """Where the answers to queries go.

    Parameters
    ----------
    out : dtype [T, H, R], or [T, H, V]
    lse : float32 [T, H]
    """

    out: torch.Tensor
    lse: torch.Tensor

    def scale_lse(self, unit: float) -> None:
        """Multiply ``lse`` in place, one that requires gradients or is of inference mode too."""
        with torch.inference_mode():
            self.lse.mul_(unit)
