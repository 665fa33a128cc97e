"""What runs is dumped: sampled layers of sampled steps, as long as there is room."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mla_step import P, R, build, config
from test_layer import layer_config, weights_of

from paged_mla_optimized import Bucket, MlaLayer, PagedMla, StepInputs, record
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.dump import load_dump
from paged_mla_shared.errors import InvalidArgument

LENGTHS = (20, 5)


def run_layer(mla: PagedMla, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn((2, R + P), generator=generator)
    mla.append(latents[:, :R].contiguous(), latents[:, R:].contiguous(), cache)
    queries = torch.randn((2, 4, R + P), generator=generator)
    return mla.attend(queries[..., :R].contiguous(), queries[..., R:].contiguous(), cache)


def run(mla: PagedMla, cache: torch.Tensor, steps: int, layers: int) -> list[torch.Tensor]:
    outs = []
    for _ in range(steps):
        mla.plan(
            MlaStep(
                torch.tensor([0, 1, 2], dtype=torch.int32),
                torch.tensor(LENGTHS, dtype=torch.int32),
                torch.tensor([[3, 1], [2, 7]], dtype=torch.int32),
                num_tokens=2,
            )
        )
        outs += [run_layer(mla, cache)[0] for _ in range(layers)]
    return outs


def test_sampled_layers_are_written(tmp_path: Path):
    """Every second step, layer 1: lengths, tables, queries, the blocks of the rows, the output."""
    mla, cache = PagedMla(config(), "cpu"), torch.randn(5, 16, R + P)
    before = cache.clone()
    with record(mla, tmp_path / "dumps", every=2, layers=(1,)) as recorder:
        outs = run(mla, cache, steps=2, layers=2)
    assert [path.name for path in recorder.written] == ["000000-001.safetensors"]
    assert recorder.skipped == 0
    dump = load_dump(recorder.written[0])
    assert dump.origin == "step 0, layer 1"
    assert dump.problem.softmax_scale == mla.config.softmax_scale
    arrays = dump.arrays
    np.testing.assert_array_equal(arrays["out"], outs[1].numpy())
    np.testing.assert_array_equal(arrays["block_ids"], [1, 2, 3])
    np.testing.assert_array_equal(arrays["seq_lens"], LENGTHS)
    np.testing.assert_array_equal(arrays["positions"], [19, 4])
    np.testing.assert_array_equal(arrays["slots"], [1 * 16 + 3, 2 * 16 + 4])
    np.testing.assert_array_equal(arrays["cache_after"], cache[[1, 2, 3]].numpy())
    untouched = np.ones((3, 16), bool)
    untouched[0, 3] = untouched[1, 4] = False
    np.testing.assert_array_equal(
        arrays["cache_before"][untouched], before[[1, 2, 3]].numpy()[untouched]
    )


def test_a_step_is_what_was_planned(tmp_path: Path):
    """An engine may write the next lengths once a step is planned."""
    mla, cache = PagedMla(config(), "cpu"), torch.randn(5, 16, R + P)
    starts, lens = torch.tensor([0, 1, 2]).int(), torch.tensor(LENGTHS).int()
    with record(mla, tmp_path) as recorder:
        mla.plan(MlaStep(starts, lens, torch.tensor([[3, 1], [2, 7]]).int(), num_tokens=2))
        lens.add_(1)
        starts.zero_()
        run_layer(mla, cache)
    [path] = recorder.written
    np.testing.assert_array_equal(load_dump(path).arrays["seq_lens"], LENGTHS)
    np.testing.assert_array_equal(load_dump(path).arrays["cu_seqlens_q"], [0, 1, 2])


@pytest.mark.parametrize("spelling", ["qlen", "full"])
def test_a_mask_is_that_of_its_rows(tmp_path: Path, spelling: str):
    """S-14: what a step's buffer holds behind it is no part of the dump, and breaks no rule."""
    tree = config(mask=f"tree:{spelling}", max_draft_tokens=4)
    mla, cache = PagedMla(tree, "cpu"), torch.randn(5, 16, R + P)
    inputs = StepInputs(tree, "cpu", {})
    starts, lens, table = ([0, 1, 2], LENGTHS, [[3, 1], [2, 7]])
    mask = torch.ones(2 if spelling == "qlen" else sum(LENGTHS), dtype=torch.bool)
    lengths = (torch.tensor(t).int() for t in (starts, lens, table))
    inputs.load(MlaStep(*lengths, num_tokens=2, mask=mask))
    view = inputs.view(Bucket(tokens=2, rows=2))
    with record(mla, tmp_path) as recorder:
        mla.plan(view.step)
        run_layer(mla, cache)
    [path] = recorder.written
    np.testing.assert_array_equal(load_dump(path).arrays["mask"], mask)


def test_two_recorders(tmp_path: Path):
    """Both write, and the outer one goes on when the inner one closes."""
    mla, cache = PagedMla(config(), "cpu"), torch.randn(5, 16, R + P)
    kept = dict(vars(mla))
    with record(mla, tmp_path / "outer") as outer:
        with record(mla, tmp_path / "inner") as inner:
            run(mla, cache, steps=1, layers=1)
        run(mla, cache, steps=1, layers=1)
    assert (len(outer.written), len(inner.written)) == (2, 1)
    assert vars(mla) == kept


@pytest.mark.parametrize("kind", ["attention", "layer"])
def test_steps_in_flight_have_a_dump_each(tmp_path: Path, kind: str):
    """S-17: the step of `planned=` is recorded, and calls of two steps may be interleaved."""
    steps = [build((20, 1), (5, 5)), build((40, 1), (33, 2), (9, 3))]
    attention, weights = steps[0].config, weights_of(4)
    mla: PagedMla | MlaLayer = PagedMla(attention, "cpu", steps_in_flight=2)
    if kind == "layer":
        mla = MlaLayer(layer_config(attention), "cpu", steps_in_flight=2)
    named: dict[str, Any] = {"weights": weights} if kind == "layer" else {}
    width = 16 if kind == "layer" else R
    with record(mla, tmp_path) as recorder:
        planned = []
        for step in steps:
            query_lens = [count for _, count in step.rows]
            lens = {"query_lens": query_lens, "max_seq_lens": [n for n, _ in step.rows]}
            absorbed = {"absorbed_rows": len(planned)} if kind == "layer" else {}
            planned.append(mla.plan(replace(step.described, **lens), **absorbed))
        for _ in range(2):  # layers
            for step, one in zip(steps, planned, strict=True):
                latents = torch.zeros(len(step.q_pe), R), torch.zeros(len(step.q_pe), P)
                mla.append(*latents, step.cache, planned=one)
            for step, one in zip(steps, planned, strict=True):
                q_nope = torch.ones(len(step.q_pe), 4, width)
                mla.attend(q_nope, step.q_pe, step.cache, planned=one, **named)
    names = [f"{number:06}-{layer:03}.safetensors" for layer in (0, 1) for number in (0, 1)]
    assert [path.name for path in recorder.written] == names
    for path, number in zip(recorder.written, (0, 1, 0, 1), strict=True):
        arrays, step = load_dump(path).arrays, steps[number]
        np.testing.assert_array_equal(arrays["seq_lens"], step.seq_lens)
        np.testing.assert_array_equal(arrays["block_table"], step.block_table)
        np.testing.assert_array_equal(arrays["positions"], planned[number].positions)
        np.testing.assert_array_equal(arrays["slots"], planned[number].slot_mapping)
        np.testing.assert_array_equal(arrays["q_pe"], step.q_pe)
        assert len(arrays["ckv"]) == len(step.q_pe)
        if kind == "layer":
            assert arrays["absorbed_rows"] == number


def test_dumps_are_bounded(tmp_path: Path):
    """What has no room is counted, and the step runs all the same."""
    mla, cache = PagedMla(config(), "cpu"), torch.randn(5, 16, R + P)
    with record(mla, tmp_path, most_bytes=1000) as recorder:
        run(mla, cache, steps=1, layers=1)
    assert not recorder.written
    assert recorder.skipped == 1


def test_an_instance_of_another_class(tmp_path: Path):
    """Refused by name, before a folder is made."""
    with (
        pytest.raises(InvalidArgument, match=r"^instance: got a MlaConfig; allowed: a PagedMla"),
        record(config(), tmp_path / "dumps"),
    ):
        pass
    assert not list(tmp_path.iterdir())


def test_nothing_stays(tmp_path: Path):
    """After the context an instance is as it was."""
    mla = PagedMla(config(), "cpu")
    kept = dict(vars(mla))
    with record(mla, tmp_path):
        assert vars(mla) != kept
    assert vars(mla) == kept


def test_a_sample_is_of_some_steps(tmp_path: Path):
    """0 steps of so many are none."""
    with (
        pytest.raises(InvalidArgument, match="every"),
        record(PagedMla(config(), "cpu"), tmp_path, every=0),
    ):
        pass


def test_the_recipe_of_the_page_writes_a_dump(tmp_path: Path):
    """What FlashMLA is called with, in its shapes, becomes a dump of the blocks that rows use."""
    page = (Path(__file__).parents[1] / "docs" / "dumps.md").read_text()
    [code] = [c for c in re.findall(r"```python\n(.+?)```", page, re.DOTALL) if "def keep" in c]
    recipe: dict[str, Any] = {}
    exec(code, recipe)
    q = torch.randn(2, 1, 16, 576, dtype=torch.bfloat16)
    cache = torch.randn(7, 64, 1, 576, dtype=torch.bfloat16)
    recipe["keep"](
        tmp_path / "x.safetensors",
        q_nope=q.flatten(0, 1)[..., :512],
        q_pe=q.flatten(0, 1)[..., 512:],
        cache=cache[:, :, 0],
        block_table=torch.tensor([[6, 2], [1, 5]], dtype=torch.int32),
        seq_lens=torch.tensor([65, 3], dtype=torch.int32),
        out=torch.zeros(2, 16, 512, dtype=torch.bfloat16),
        lse=torch.zeros(2, 16),
        scale=0.1,
    )
    arrays = load_dump(tmp_path / "x.safetensors").arrays
    assert arrays["block_ids"].tolist() == [1, 2, 6]
    assert arrays["cu_seqlens_q"].tolist() == [0, 1, 2]
    assert arrays["cache_after"].shape == (3, 64, 576)


def test_the_recipe_of_a_prefill(tmp_path: Path):
    """S-21: it holds what it is explained from, in the types of a dump."""
    page = (Path(__file__).parents[1] / "docs" / "dumps.md").read_text()
    recipe: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.+?)```", page, re.DOTALL):
        if "def keep" in code or "def dump_prefill" in code:
            exec(code, recipe)
    sums = torch.tensor([0, 3, 5], dtype=torch.int32)
    shapes = {"q_nope": (5, 16, 128), "q_pe": (5, 16, 64), "k_nope": (5, 16, 128), "k_pe": (5, 64)}
    shapes |= {"v": (5, 16, 128), "out": (5, 16, 128), "lse": (5, 16)}
    given = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    path = tmp_path / "x.safetensors"
    recipe["dump_prefill"](path, cu_seqlens_q=sums, cu_seqlens_k=sums, scale=0.1, **given)
    arrays = load_dump(path).arrays
    assert arrays["prefill_lse"].dtype == np.float32
    assert arrays["prefill_causal"].item()
    assert {name.removeprefix("prefill_") for name in arrays} == {
        *shapes, "cu_seqlens_q", "cu_seqlens_k", "causal",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", 0),
        ("every", 1.5),
        ("every", True),
        ("layers", [0, 1.0]),
        ("layers", [-1]),
        ("layers", 3),
        ("most_bytes", 1e9),
        ("most_bytes", -1),
    ],
)
def test_samples_are_counted_in_integers(tmp_path, name, value):
    """Refused by name, before a folder is made."""
    with (
        pytest.raises(InvalidArgument, match=f"^{name}: got "),
        record(PagedMla(config(), "cpu"), tmp_path / "dumps", **{name: value}),
    ):
        pass
    assert not (tmp_path / "dumps").exists()
