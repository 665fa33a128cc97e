"""The output of a layer's step, in both forms; tree masks and non-causal masks allow one form."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import DIMS, causal, loops, request, scene

from paged_mla_reference.rules.absorb import UpProjection
from paged_mla_reference.rules.layer import layer
from paged_mla_reference.rules.masks import spell_mask
from paged_mla_reference.rules.validation.inputs import validate_layer
from paged_mla_reference.tolerance.layers import RightLayer
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.problem import Mask, MaskSpelling

CONTEXTS = (9, 0, 5)
TREES = (
    np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool),
    np.tri(4, dtype=bool),
    np.eye(2, dtype=bool),
)
MASKS = (Mask.NON_CAUSAL, Mask.CAUSAL, *MaskSpelling)


def of_mask(mask, absorbed_rows=3):
    """Return three rows, a token of padding behind them, and what each query sees of its row."""
    spelling = mask if isinstance(mask, MaskSpelling) else MaskSpelling.QLEN
    mask = Mask.TREE if isinstance(mask, MaskSpelling) else mask
    requests = [
        request(context + len(tree), seed)
        for seed, (context, tree) in enumerate(zip(CONTEXTS, TREES, strict=True))
    ]
    made = scene(requests, CONTEXTS, mask=mask)
    problem = replace(made.problem, mask_spelling=spelling)
    step = made.batch
    if mask is Mask.TREE:
        lines = spell_mask(TREES, spelling, step.seq_lens, problem.max_draft_tokens, 10)
        step = replace(step, mask=lines)
    padded = {
        name: np.concatenate([array, np.full_like(array[:1], np.nan)])
        for name, array in vars(step).items()
        if name in {"q_nope", "q_pe", "ckv", "k_pe"}
    }
    step = replace(step, **padded)
    rng = np.random.default_rng(3)
    q_nope = rng.standard_normal((10, 2, DIMS.qk_nope_head_dim), dtype=np.float32)
    q_nope[9] = np.nan
    weights = rng.standard_normal((2 * (3 + 5), DIMS.kv_lora_rank), dtype=np.float32)
    batch = LayerBatch(replace(step, q_nope=q_nope), weights, absorbed_rows, 64)
    return problem, batch, made.image, requests


def sees(mask, row):
    """Return which keys of a row a token sees, both counted from the row's first key."""
    context, tree = CONTEXTS[row], TREES[row]
    if mask is Mask.CAUSAL:
        return causal
    if mask is Mask.NON_CAUSAL:
        return lambda *_: True
    return lambda query, key: bool(key < context or tree[query - context, key - context])


@pytest.mark.parametrize("mask", MASKS)
def test_absorbed_rows_see_what_the_mask_lets_them(mask):
    """S-21, S-14: the output and the expected output are those of plain loops over latents."""
    problem, batch, image, requests = of_mask(mask)
    weights = UpProjection.of_kv_b_proj(batch.kv_b_proj, DIMS)
    answer = layer(problem, batch, image)
    right = RightLayer.of(problem, batch, image).exact
    absorbed = np.einsum("thn,hnr->thr", batch.step.q_nope.astype(np.float64), weights.w_uk)
    start = 0
    for row, (one, context, tree) in enumerate(zip(requests, CONTEXTS, TREES, strict=True)):
        stop = start + len(tree)
        queries = np.zeros_like(one.q_nope, dtype=np.float64)
        queries[context:] = absorbed[start:stop]
        told = replace(one, q_nope=queries)
        latents, lse = loops(told, range(context, len(one)), sees(mask, row))
        out = np.einsum("thr,hvr->thv", latents, weights.w_uv)
        for found in (answer, right):
            np.testing.assert_allclose(found.out[start:stop], out, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(found.lse[start:stop], lse, rtol=1e-5, atol=1e-5)
        start = stop
    assert (answer.out[9] == 0).all()
    assert np.isneginf(answer.lse[9]).all()


@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask is not Mask.CAUSAL])
@pytest.mark.parametrize("rows", [0, 1, 2])
def test_rows_of_other_masks_are_all_absorbed(mask, rows):
    """S-21: materialized rows are causal, so their output under another mask would be wrong."""
    problem, batch, _, _ = of_mask(mask)
    validate_layer(problem, batch)
    with pytest.raises(InvalidArgument) as raised:
        validate_layer(problem, replace(batch, absorbed_rows=rows))
    assert raised.value.argument == "absorbed_rows"
