"""Whole layers and prefills are dumped as they run, and explained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import prefill_step
import pytest
import torch
from ci.installed import import_or_skip
from mla_step import P, R, build
from test_layer import HEADS, N, V, layer_config, lens_of, plan, weights_of

from paged_mla_optimized import MlaLayer, Prefill, record
from paged_mla_shared.dump import Dump, load_dump
from paged_mla_shared.errors import Unsupported

ROWS = ((20, 1), (30, 30), (40, 4))


TREE = {"mask": "tree:qlen", "max_draft_tokens": 32}


def layer_dump(folder: Path, *, absorbed_rows: int = 1, **changes: object) -> Dump:
    """Return the dump of a layer: a row absorbed, the keys of two others in two parts."""
    step = build(*ROWS, num_heads=HEADS, max_query_tokens=40, **changes)
    mask = None
    if step.config.is_tree:  # chains
        mask = torch.cat([torch.ones(q, q).tril().bool().flatten() for _, q in ROWS])
    step.cache.nan_to_num_(0.5)
    weights, generator = weights_of(HEADS), torch.Generator().manual_seed(0)
    latents = torch.randn(35, R + P, generator=generator)
    q = torch.randn(35, HEADS, N + P, generator=generator)
    layer = MlaLayer(layer_config(step.config, 40), "cpu")
    with record(layer, folder) as samples:
        plan(layer, step, absorbed_rows=absorbed_rows, mask=mask, **lens_of(step))
        layer.append(latents[:, :R], latents[:, R:], step.cache)
        layer.attend(q[..., :N], q[..., N:], step.cache, weights=weights)
    assert "attend" not in vars(layer)
    [path] = samples.written
    return load_dump(path)


def prefill_dump(folder: Path, **changes: object) -> Dump:
    """Return the dump of a prefill whose keys and values are halves of one projection."""
    step = prefill_step.build((20, 5), (9, 9), (0, 0), **changes)
    k_and_v = torch.cat([step.k_nope, step.v], dim=-1)
    step.k_nope, step.v = k_and_v.split([prefill_step.NOPE, prefill_step.V], dim=-1)
    prefill = Prefill(step.config, "cpu")
    with record(prefill, folder) as samples:
        step.plan(prefill)
        prefill.attend(*step.tensors)
    [path] = samples.written
    return load_dump(path)


def test_a_prefill_is_what_was_planned(tmp_path: Path):
    """An engine may write the next lengths once a step is planned."""
    step = prefill_step.build((20, 5), (9, 9))
    prefill = Prefill(step.config, "cpu")
    starts, key_starts = torch.tensor([0, 5, 14]).int(), torch.tensor([0, 20, 29]).int()
    with record(prefill, tmp_path) as samples:
        prefill.plan(starts, key_starts, num_tokens=14)
        starts.zero_()
        key_starts.zero_()
        prefill.attend(*step.tensors)
    arrays = load_dump(samples.written[0]).arrays
    np.testing.assert_array_equal(arrays["prefill_cu_seqlens_q"], [0, 5, 14])
    np.testing.assert_array_equal(arrays["prefill_cu_seqlens_k"], [0, 20, 29])


def test_a_layer(tmp_path: Path):
    """S-21: which rows were absorbed, the chunks, the weights; latents with their strides."""
    dump = layer_dump(tmp_path)
    arrays = dump.arrays
    assert (int(arrays["absorbed_rows"]), int(arrays["workspace"])) == (1, 40)
    assert arrays["kv_b_proj"].shape == (HEADS * (N + V), R)
    assert arrays["ckv"].strides == (4 * (R + P), 4)
    np.testing.assert_array_equal(arrays["ckv_left"], arrays["ckv"])
    assert not {"q_nope", "out", "lse"} & arrays.keys()


def test_a_prefill(tmp_path: Path):
    dump = prefill_dump(tmp_path)
    assert dump.arrays["prefill_v"].strides[1] == 4 * (prefill_step.NOPE + prefill_step.V)
    assert dump.arrays["prefill_cu_seqlens_k"].tolist() == [0, 20, 29, 29]
    assert dump.arrays["prefill_causal"].item()


def test_they_are_explained(tmp_path: Path):
    """Nothing is broken; a fault in what came back is."""
    explanation = import_or_skip("paged_mla_reference.explain.explanation")
    for dump, name in ((layer_dump(tmp_path), "layer"), (prefill_dump(tmp_path), "prefill")):
        assert explanation.explain(dump).verdict == "No rule is broken."
        arrays = {**dump.arrays, f"{name}_lse": dump.arrays[f"{name}_lse"] / np.float32(np.log(2))}
        found = explanation.explain(Dump(problem=dump.problem, arrays=arrays))
        assert found.found.first.stage == name


@pytest.mark.parametrize("changes", [{"mask": "non_causal"}, TREE], ids=["non-causal", "tree"])
def test_a_layer_that_materializes_nothing_is_explained(tmp_path: Path, changes: dict[str, object]):
    """S-21: it has no workspace, and a dump has one of legal size; budgets are those of causal."""
    explanation = import_or_skip("paged_mla_reference.explain.explanation")
    dump = layer_dump(tmp_path, absorbed_rows=3, **changes)
    verdict = "No rule is broken in what the dump contains; undecided: out, lse."
    assert explanation.explain(dump).verdict == verdict


def test_what_is_not_written_is_not_dumped(tmp_path: Path):
    with pytest.raises(Unsupported, match="writes_empty"):
        prefill_dump(tmp_path, writes_empty=False)
