"""Rules S-8 and S-21: a layer between its projections, with absorbed and materialized rows.

Every key is read from the cache after the step's own tokens are appended. The output of a token
therefore does not depend on the number of tokens in its step (S-19), even if the cache rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paged_mla_reference.rules.absorb import UpProjection
from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import gather_context
from paged_mla_reference.rules.chunked import merge_parts, parts_of
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.prefill import prefill
from paged_mla_reference.rules.rope import rotate
from paged_mla_reference.rules.rounding import Rounding, round_to, widen
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Mask, Output, Problem, cu_seqlens_of

Parts = Callable[[PrefillBatch, int], list[PrefillBatch]]
Join = Callable[[Sequence[Output]], Output]


def layer(
    problem: Problem,
    batch: LayerBatch,
    image: CacheImage,
    parts: Parts = parts_of,
    join: Join = merge_parts,
) -> Output:
    """Attend to a cache that contains the step's own tokens; round where the rules round.

    Parameters
    ----------
    problem : Problem
    batch : LayerBatch
        Valid (:func:`paged_mla_reference.rules.validation.inputs.validate_layer`).
    image : CacheImage
        The cache after the step's append.
    parts, join : callable
        The functions that cut keys which do not fit the workspace into parts, and that merge the
        outputs over these parts.

    Returns
    -------
    Output
        ``out`` dtype [T, H, V], ``lse`` float32 [T, H].
    """
    weights = UpProjection.of_kv_b_proj(batch.kv_b_proj, problem.dims)
    leading, following = split_rows(batch.step, batch.absorbed_rows)
    first = _absorbed(problem, leading, image, weights)
    whole = materialized_step(problem, following, image, weights)
    fits = int(whole.cu_seqlens_k[-1]) <= batch.workspace
    cut = [whole] if fits else parts(whole, batch.workspace)
    answers = [prefill(problem, part, Rounding.SPEC).output(problem.dtype) for part in cut]
    second = answers[0] if fits else join(answers)
    return Output(
        np.concatenate([first.out, round_to(second.out, problem.dtype)]),
        np.concatenate([first.lse, second.lse]),
    )


def split_rows(step: Batch, rows: int) -> tuple[Batch, Batch]:
    """Return a step of the first `rows` rows, and a step of the other rows and the padded tokens.

    Both steps keep the mask of `step`, and neither has a slot mapping. A step with a mask has only
    absorbed rows, so the first step then has all rows.
    """
    tokens = int(step.cu_seqlens_q[rows])
    halves = []
    for row, token in (
        (slice(0, rows), slice(0, tokens)),
        (slice(rows, None), slice(tokens, None)),
    ):
        starts = step.cu_seqlens_q[row.start : None if row.stop is None else row.stop + 1]
        halves.append(
            replace(
                step,
                cu_seqlens_q=starts - starts[0],
                seq_lens=step.seq_lens[row],
                block_table=step.block_table[row],
                slot_mapping=None,
                **{name: getattr(step, name)[token] for name in ("q_nope", "q_pe", "ckv", "k_pe")},
            )
        )
    return halves[0], halves[1]


def absorbed_step(problem: Problem, batch: LayerBatch, rounding: Rounding = Rounding.SPEC) -> Batch:
    """Return the step with absorbed queries, for attention over latents."""
    weights = UpProjection.of_kv_b_proj(batch.kv_b_proj, problem.dims)
    return replace(batch.step, q_nope=weights.absorb(batch.step.q_nope, problem.dtype, rounding))


def materialized_step(
    problem: Problem,
    step: Batch,
    image: CacheImage,
    weights: UpProjection,
    rounding: Rounding = Rounding.SPEC,
) -> PrefillBatch:
    """Return the step with the keys and values of every head; the result has no tree mask.

    Parameters
    ----------
    problem : Problem
    step : Batch
    image : CacheImage
        The cache that contains all keys of the step.
    weights : UpProjection
    rounding : Rounding
        ``SPEC`` rounds keys, values and a rotated ``q_pe`` to the problem's dtype.

    Returns
    -------
    PrefillBatch
        Causal if the problem's mask is causal, and non-causal otherwise.
    """
    ckv, k_pe = gather_context(problem, step, image)
    k_nope, v = weights.materialize(ckv, problem.dtype, rounding)
    q_pe = step.q_pe
    if problem.rope is not None:
        q_pe = rotate(widen(q_pe), metadata(problem, step).positions, problem.rope)
        if rounding is Rounding.SPEC:
            q_pe = round_to(q_pe, problem.dtype)
    return PrefillBatch(
        cu_seqlens_q=step.cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_of(step.seq_lens),
        q_nope=step.q_nope,
        q_pe=q_pe,
        k_nope=k_nope,
        k_pe=k_pe,
        v=v,
        causal=problem.mask is Mask.CAUSAL,
    )


def _absorbed(problem: Problem, step: Batch, image: CacheImage, weights: UpProjection) -> Output:
    step = replace(step, q_nope=weights.absorb(step.q_nope, problem.dtype))
    answer = attend(problem, step, image, Rounding.SPEC).output(problem.dtype)
    return Output(round_to(weights.project(answer.out), problem.dtype), answer.lse)
