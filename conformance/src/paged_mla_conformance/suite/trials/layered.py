"""Check whole layers: each step in both forms and in parts, and prompts in chunks (S-21, S-19).

Later steps of a runner must have the bits of a new runner (S-17). Rows of a batch-invariant backend
must have the same bits with any other rows (S-20).

All outputs are compared with one output that is computed exactly from the latents, the queries and
the weights (:mod:`paged_mla_reference.tolerance.layers`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from paged_mla_conformance.suite.trials.both_forms import Layer, layers_of
from paged_mla_conformance.suite.trials.metamorphic import arrangements, of_rows
from paged_mla_conformance.suite.trials.trial import Stage, Trial
from paged_mla_reference.tolerance import compare
from paged_mla_reference.tolerance.compare import Check
from paged_mla_reference.tolerance.layers import RightLayer
from paged_mla_shared.backend import Runner
from paged_mla_shared.dtypes import dtype_name
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Batch, Mask, Output, cu_seqlens_of

CHUNK_ENDS = (40, 64, 71)  # positions: inside a block, at a block edge, and a few tokens later
IN_CHUNKS = {"mixed", "padding", "replay"}  # features that steps of chunks need


def check_layer(trial: Trial) -> None:
    """Check every step of the trial's case through the operation ``layer``."""
    runner = trial.prepare_first()
    in_chunks = trial.backend.capabilities.features >= IN_CHUNKS
    for number, layer in enumerate(layers_of(trial)):
        stage = layer.stage
        right = RightLayer.of(stage.problem, layer.asked(), stage.after)
        step = layer.asked().step
        for rows, workspace in _forms(stage):
            runner.load_cache(stage.before)
            answer = _ask(runner, stage, layer.asked(rows, workspace))
            trial.checks += _check(_over_held(trial, runner, stage, right), answer, workspace)
            if trial.case.then:
                fresh = _alone(trial, layer, rows, workspace)
                trial.check_fresh(answer, fresh, f"step {number}, {rows} rows absorbed")
        is_causal = stage.problem.mask is Mask.CAUSAL
        if in_chunks and is_causal and (step.query_lens == step.seq_lens).all():
            runner.load_cache(stage.before)
            answer, workspace = _in_chunks(runner, layer, step), stage.problem.max_query_tokens
            trial.checks += _check(_over_held(trial, runner, stage, right), answer, workspace)


def check_layer_bits(trial: Trial) -> None:
    """Check that rows of a right output keep their bits in each arrangement of rows (S-20).

    The caller chooses the form of a row and the parts of its keys, and both stay the same: either
    all rows are absorbed, or no row is and the keys are in one part.
    """
    [step], [layer] = build_steps(trial.case, trial.dims, trial.dtype), layers_of(trial)
    stage, problem = layer.stage, layer.stage.problem
    right = RightLayer.of(problem, layer.asked(), stage.after)
    workspace = problem.max_rows * max(problem.max_model_len, problem.max_query_tokens)
    forms = {"absorbed": True, "materialized": False}
    if problem.mask is not Mask.CAUSAL:
        del forms["materialized"]
    for form, absorbed in forms.items():
        runner = _loaded(trial, stage)
        whole = _ask(runner, stage, layer.asked(absorbed * stage.batch.num_rows, workspace))
        trial.checks += _check(_over_held(trial, runner, stage, right), whole, workspace)
        for name, rows in arrangements(step.batch).items():
            some = of_rows(step, rows)
            part = Layer(Stage.of(some.step), layer.q[some.tokens], layer.kv_b_proj)
            actual = _alone(trial, part, absorbed * len(rows), workspace)
            expected = Output(whole.out[some.tokens], whole.lse[some.tokens])
            trial.checks += compare.check_bitwise("S-20", actual, expected, f"{name}, {form}")


def _alone(trial: Trial, layer: Layer, absorbed_rows: int, workspace: int) -> Output:
    """Return the output of a new runner that runs only this layer."""
    runner = _loaded(trial, layer.stage)
    return _ask(runner, layer.stage, layer.asked(absorbed_rows, workspace))


def _loaded(trial: Trial, stage: Stage) -> Runner:
    """Return a new runner with the cache from before the append."""
    runner = trial.prepare()
    runner.load_cache(stage.before)
    return runner


def _ask(runner: Runner, stage: Stage, batch: LayerBatch) -> Output:
    """Call a layer and return its output; `out` must have the problem's dtype (S-5)."""
    answer, dtype = runner.layer(batch), stage.problem.dtype
    if dtype_name(answer.out.dtype) != dtype:
        raise compare.Mismatch("S-5", "out", f"dtype {answer.out.dtype}, expected {dtype}")
    return answer


def _over_held(trial: Trial, runner: Runner, stage: Stage, right: RightLayer) -> RightLayer:
    """Compare the cache of a runner that wrote a step; return the right layer over that cache.

    The runner may round rotated keys in another legal way (S-12).
    """
    held = trial.compare_cache(runner, stage, is_written=True)
    if (held.blocks == stage.after.blocks).all():
        return right
    return RightLayer.of(stage.problem, right.batch, held)


def _check(right: RightLayer, answer: Output, workspace: int) -> list[Check]:
    """Compare an output that was computed in parts of at most `workspace` keys."""
    allowed = right.allowed_in_parts(workspace)
    return compare.check_layer(right.batch.step, answer, right.exact, allowed)


def _forms(stage: Stage) -> Iterator[tuple[int, int]]:
    """Yield pairs of the number of absorbed rows and the workspace.

    They are half of the rows with one part, no rows with several parts, then all rows. If the mask
    is not causal, all rows are absorbed.
    """
    keys, fewest = int(stage.batch.seq_lens.sum()), stage.problem.max_query_tokens
    if stage.problem.mask is not Mask.CAUSAL:
        yield stage.batch.num_rows, fewest
        return
    yield stage.batch.num_rows // 2, max(keys, fewest)
    yield 0, max(keys // 4, fewest)
    yield stage.batch.num_rows, fewest


def _in_chunks(runner: Runner, layer: Layer, step: Batch) -> Output:
    """Return the output of whole prompts that run in chunks of tokens, one step for each chunk."""
    problem = layer.stage.problem
    lines = (step.num_tokens, problem.dims.num_heads)
    out, lse = np.zeros((*lines, problem.dims.v_head_dim)), np.full(lines, -np.inf, np.float32)
    for tokens, chunk in _chunks(step):
        asked = LayerBatch(chunk, layer.kv_b_proj, 0, problem.max_query_tokens)
        part = _ask(runner, layer.stage, asked)
        out[tokens], lse[tokens] = part.out, part.lse
    return Output(out, lse)


def _chunks(step: Batch) -> Iterator[tuple[NDArray[np.int64], Batch]]:
    """Yield the chunks of whole prompts: the numbers of their tokens, and a step with them."""
    lens = step.query_lens.astype(np.int64)
    ends = [end for end in CHUNK_ENDS if end < lens.max()]
    for first, last in pairwise((0, *ends, int(lens.max()))):
        begins, stops = np.minimum(first, lens), np.minimum(last, lens)
        spans = zip(step.cu_seqlens_q, begins, stops, strict=False)
        tokens = np.concatenate([np.arange(start + a, start + b) for start, a, b in spans])
        names = ("q_nope", "q_pe", "ckv", "k_pe")
        yield (
            tokens,
            replace(
                step,
                cu_seqlens_q=cu_seqlens_of(stops - begins),
                seq_lens=stops.astype(np.int32),
                slot_mapping=None,
                **{name: getattr(step, name)[tokens] for name in names},
            ),
        )
