"""The exact output of a whole layer, and its error budget: the larger of both forms' budgets.

The rounded oracle of each form rounds the intermediate results of this form to the problem's dtype
(S-21). If the keys are in parts, the budget includes the rounding of each part and the merge (S-8).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.rules.absorb import UpProjection
from paged_mla_reference.rules.attention import Answer, attend
from paged_mla_reference.rules.layer import absorbed_step, materialized_step
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_reference.tolerance import budgets
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Problem


@dataclass(frozen=True)
class RightLayer:
    """The exact output of a layer's step, and the larger of both forms' error budgets.

    Parameters
    ----------
    problem : Problem
    batch : LayerBatch
    exact : Answer
    allowed : float64 [T] and float64 [T, H]
        The largest allowed errors of ``out`` and ``lse`` if the keys are in one part.
    """

    problem: Problem
    batch: LayerBatch
    exact: Answer
    allowed: tuple[NDArray[np.float64], NDArray[np.float64]]

    @classmethod
    def of(cls, problem: Problem, batch: LayerBatch, image: CacheImage) -> RightLayer:
        """Run the oracle in both forms, over a cache that contains the step's own tokens."""
        weights = UpProjection.of_kv_b_proj(batch.kv_b_proj, problem.dims)
        visible = visibility(problem, batch.step)
        exact, materialized = (
            prefill(problem, materialized_step(problem, batch.step, image, weights, r), r, visible)
            for r in Rounding
        )
        widest, over_latents = (attended(problem, batch, image, r) for r in Rounding)
        # Scores of the absorbed form sum R + P products. Both forms rotate the same elements.
        exact = replace(
            exact,
            score_bound=np.maximum(exact.score_bound, widest.score_bound),
            turn_error=widest.turn_error,
        )
        projected = widen(round_to(over_latents.out, problem.dtype))
        forms = (replace(over_latents, out=projected), materialized)
        keys, terms = keys_of_tokens(batch.step), problem.dims.cached_dim
        outs = [budgets.out_budget(problem.dtype, exact, form, keys, terms) for form in forms]
        lses = [budgets.lse_budget(exact, form, keys, terms) for form in forms]
        return cls(problem, batch, exact, (np.maximum(*outs), np.maximum(*lses)))

    def allowed_in_parts(self, workspace: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the allowed errors if the keys are cut into parts of `workspace` keys."""
        parts = -(-int(self.batch.step.seq_lens.sum()) // workspace) + 1
        return budgets.parts_budget(self.problem.dtype, self.exact, self.allowed, parts)


def attended(problem: Problem, batch: LayerBatch, image: CacheImage, rounding: Rounding) -> Answer:
    """Return the absorbed oracle's output of a layer, with ``out`` projected to [T, H, V]."""
    answer = attend(problem, absorbed_step(problem, batch, rounding), image, rounding)
    weights = UpProjection.of_kv_b_proj(batch.kv_b_proj, problem.dims)
    return replace(answer, out=weights.project(answer.out))
