"""One step of a layer in both forms: absorbed over the cache, materialised beside it (S-21).

Both are held against one answer, exact from the latents, the queries and the weights. What each
form hands on in the problem's dtype, the rounded oracle rounds too, so that the budget has it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.trial import Stage, Trial
from paged_mla_reference.absorb import UpProjection
from paged_mla_reference.attention import Answer, attend
from paged_mla_reference.cache import gather_context
from paged_mla_reference.judging import budgets, compare
from paged_mla_reference.judging.compare import Check, Mismatch
from paged_mla_reference.paging import keys_of_tokens
from paged_mla_reference.prefill import prefill
from paged_mla_reference.rounding import Rounding, round_to
from paged_mla_shared.inputs import build_steps, normal
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Output, Rows


@dataclass(frozen=True)
class Layer:
    """A stage, the heads' queries [T, H, N] before they are absorbed, and weights of its dtype."""

    stage: Stage
    q: NDArray[Any]
    kv_b_proj: NDArray[Any]

    @classmethod
    def of(cls, stage: Stage, seed: int) -> Layer:
        """Draw queries and weights; keys and values are as large as latents."""
        dims, dtype = stage.problem.dims, stage.problem.dtype
        rng = np.random.default_rng(seed)
        q = normal(rng, (stage.batch.num_tokens, dims.num_heads, dims.qk_nope_head_dim), dtype)
        rows = dims.num_heads * (dims.qk_nope_head_dim + dims.v_head_dim)
        rank = dims.kv_lora_rank
        kv_b_proj = normal(rng, (rows, rank), dtype, rank**-0.5)
        return cls(stage, q, kv_b_proj)

    @property
    def weights(self) -> UpProjection:
        """Both projections."""
        return UpProjection.of_kv_b_proj(self.kv_b_proj, self.stage.problem.dims)

    def materialised(self, rounding: Rounding = Rounding.SPEC) -> PrefillBatch:
        """Return the step with keys and values of every head."""
        problem, batch = self.stage.problem, self.stage.batch
        ckv, k_pe = gather_context(problem, batch, self.stage.after)
        k_nope, v = self.weights.materialise(ckv, problem.dtype, rounding)
        return PrefillBatch(
            cu_seqlens_q=batch.cu_seqlens_q,
            cu_seqlens_k=np.append(0, np.cumsum(batch.seq_lens)).astype(np.int32),
            q_nope=self.q,
            q_pe=batch.q_pe,
            k_nope=k_nope,
            k_pe=k_pe,
            v=v,
        )

    def absorbed(self, rounding: Rounding = Rounding.SPEC) -> Batch:
        """Return the step with absorbed queries."""
        q_nope = self.weights.absorb(self.q, self.stage.problem.dtype, rounding)
        return replace(self.stage.batch, q_nope=q_nope)

    def attended(self, rounding: Rounding) -> Answer:
        """Return the absorbed oracle's answer, projected."""
        problem, image = self.stage.problem, self.stage.after
        answer = attend(problem, self.absorbed(rounding), image, rounding)
        return replace(answer, out=self.weights.project(answer.out))


def check_both_forms(trial: Trial) -> None:
    """Ask every step of the trial's case in both forms."""
    runner = trial.prepare()
    seed = zlib.crc32(trial.case.id.encode())
    for stage in map(Stage.of, build_steps(trial.case, trial.dims, trial.dtype)):
        layer = Layer.of(stage, seed)
        problem, batch = stage.problem, layer.materialised()
        exact = prefill(problem, layer.materialised(Rounding.EXACT), Rounding.EXACT)
        rounded = prefill(problem, batch, Rounding.SPEC)
        trial.checks += _check(problem.dtype, batch, runner.prefill(batch), exact, rounded)

        absorbed = layer.absorbed()
        runner.load_cache(stage.after)
        answer = runner.attend(absorbed)
        projected = round_to(layer.weights.project(answer.out), "float32")
        scores = layer.attended(Rounding.EXACT).score_bound  # of R + P products
        trial.checks += _check(
            problem.dtype,
            absorbed,
            Output(projected, answer.lse),
            replace(exact, score_bound=scores),
            layer.attended(Rounding.SPEC),
        )


def _check(dtype: str, batch: Rows, actual: Output, exact: Answer, rounded: Answer) -> list[Check]:
    """Hold an answer against the exact one."""
    keys, terms = keys_of_tokens(batch), batch.query_width
    allowed = (
        budgets.out_budget(dtype, exact, rounded, keys, terms),
        budgets.lse_budget(exact, rounded, keys, terms),
    )
    return check_seen(actual, exact, allowed)


def check_seen(
    actual: Output, exact: Answer, allowed: tuple[NDArray[np.float64], NDArray[np.float64]]
) -> list[Check]:
    """Hold what sees something against the exact answer; the rest is (0, -inf)."""
    whole = exact.output("float32")
    seen = np.isfinite(whole.lse).all(axis=1)
    if (actual.out[~seen] != 0).any() or not np.isneginf(actual.lse[~seen]).all():
        raise Mismatch("S-6", "out and lse", "not (0, -inf) where nothing is seen")
    return compare.check_same(
        "S-21",
        Output(actual.out[seen], actual.lse[seen]),
        Output(whole.out[seen], whole.lse[seen]),
        (allowed[0][seen], allowed[1][seen]),
    )
