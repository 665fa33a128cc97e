"""Check a step of a layer in both forms: absorbed over the cache, and materialized (S-21).

Both outputs are compared with one output that is computed exactly from the latents, the queries and
the weights. The rounded oracle rounds every value that a form stores in the problem's dtype, so
that the budget includes these roundings.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.rules.absorb import UpProjection
from paged_mla_reference.rules.attention import Answer
from paged_mla_reference.rules.layer import absorbed_step, materialized_step
from paged_mla_reference.rules.masks import visibility
from paged_mla_reference.rules.paging import keys_of_tokens
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rounding import Rounding, round_to
from paged_mla_reference.tolerance import budgets, compare
from paged_mla_reference.tolerance.compare import Check
from paged_mla_reference.tolerance.layers import attended
from paged_mla_shared.inputs import build_steps, normal
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Mask, Output, Rows
from paged_mla_shared.strides import strided


@dataclass(frozen=True)
class Layer:
    """A stage, its queries [T, H, N] before they are absorbed, and weights in its dtype."""

    stage: Stage
    q: NDArray[Any]
    kv_b_proj: NDArray[Any]

    @classmethod
    def of(cls, stage: Stage, seed: int, *, strided_inputs: bool = False) -> Layer:
        """Draw random queries and weights for a stage.

        Queries are normal with variance 1, and NaN where a token sees no key. Weights are scaled so
        that keys and values are as large as the latents.

        Parameters
        ----------
        stage : Stage
        seed : int
        strided_inputs : bool
            Whether queries and weights are strided views.
        """
        dims, dtype = stage.problem.dims, stage.problem.dtype
        rng = np.random.default_rng(seed)
        q = normal(rng, (stage.batch.num_tokens, dims.num_heads, dims.qk_nope_head_dim), dtype)
        q[keys_of_tokens(stage.batch) == 0] = np.nan
        rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        rank = dims.kv_lora_rank
        kv_b_proj = normal(rng, (rows, rank), dtype, rank**-0.5)
        if strided_inputs:
            q, kv_b_proj = strided(q), strided(kv_b_proj)
        return cls(stage, q, kv_b_proj)

    @property
    def weights(self) -> UpProjection:
        """The projections of keys and of values."""
        return UpProjection.of_kv_b_proj(self.kv_b_proj, self.stage.problem.dims)

    def asked(self, absorbed_rows: int = 0, workspace: int = 0) -> LayerBatch:
        """Return the arguments of a ``layer`` call for this step.

        Parameters
        ----------
        absorbed_rows : int
            The number of rows to compute in absorbed form.
        workspace : int
            The number of keys that are materialized at once.
        """
        step = replace(self.stage.batch, q_nope=self.q)
        return LayerBatch(step, self.kv_b_proj, absorbed_rows, workspace)

    def materialized(self, rounding: Rounding = Rounding.SPEC) -> PrefillBatch:
        """Return the step as a prefill with keys and values of every head."""
        stage, step = self.stage, self.asked().step
        return materialized_step(stage.problem, step, stage.after, self.weights, rounding)

    def attended(self, rounding: Rounding) -> Answer:
        """Return the projected output of the absorbed oracle."""
        return attended(self.stage.problem, self.asked(), self.stage.after, rounding)


def layers_of(trial: Trial) -> Iterator[Layer]:
    """Yield a layer with its own weights for every step of the trial's case."""
    seed = zlib.crc32(trial.case.id.encode())
    for number, step in enumerate(build_steps(trial.case, trial.dims, trial.dtype)):
        yield Layer.of(Stage.of(step), seed + number, strided_inputs=trial.case.strided_inputs)


def check_both_forms(trial: Trial) -> None:
    """Check every step of the trial's case in both forms; with tree masks only in absorbed form."""
    runner = trial.prepare()
    for layer in layers_of(trial):
        stage, problem = layer.stage, layer.stage.problem
        visible = visibility(problem, stage.batch)
        exact = prefill(problem, layer.materialized(Rounding.EXACT), Rounding.EXACT, visible)
        if problem.mask is not Mask.TREE:
            batch = layer.materialized()
            rounded = prefill(problem, batch, Rounding.SPEC)
            trial.checks += _check(problem.dtype, batch, runner.prefill(batch), exact, rounded)

        absorbed = absorbed_step(problem, layer.asked())
        runner.load_cache(stage.after)
        answer = runner.attend(absorbed)
        projected = round_to(layer.weights.project(answer.out), "float32")
        widest = layer.attended(Rounding.EXACT)  # its scores are sums of R + P products
        trial.checks += _check(
            problem.dtype,
            absorbed,
            Output(projected, answer.lse),
            replace(exact, score_bound=widest.score_bound, turn_error=widest.turn_error),
            layer.attended(Rounding.SPEC),
        )


def _check(dtype: str, batch: Rows, actual: Output, exact: Answer, rounded: Answer) -> list[Check]:
    """Compare an output with the exact output."""
    keys, terms = keys_of_tokens(batch), batch.query_width
    allowed = (
        budgets.out_budget(dtype, exact, rounded, keys, terms),
        budgets.lse_budget(exact, rounded, keys, terms),
    )
    return compare.check_layer(batch, actual, exact, allowed)
