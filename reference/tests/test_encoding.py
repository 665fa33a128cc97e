"""A synthetic format with separate scales: tokens are written, read and copied with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import problem_of, request, scene
from simulator_runs import TINY, ask, check_answers

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import (
    append,
    copy_slots,
    gather_context,
    read_slots,
    write_slots,
)
from paged_mla_reference.rules.drafts import copy_tails
from paged_mla_reference.rules.encoding import ENCODINGS, as_cached
from paged_mla_reference.rules.rounding import Rounding, widen
from paged_mla_reference.rules.slots import Encoding
from paged_mla_reference.rules.validation.inputs import validate_problem
from paged_mla_reference.simulator.config import EngineConfig
from paged_mla_reference.simulator.scenario import Scenario
from paged_mla_reference.simulator.trace import record
from paged_mla_shared.errors import InvalidArgument
from paged_mla_shared.formats import FORMATS, CacheFormat, ScaleTensor
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.poison import poisoned_image


def _store(slots, ckv, k_pe):
    """Divide a token by the least power of two that no number of it passes."""
    largest = np.abs(np.hstack([widen(ckv), widen(k_pe)])).max(axis=1)
    scale = np.exp2(np.ceil(np.log2(largest)))[:, None]
    slots.field("ckv")[slots.at] = widen(ckv) / scale
    slots.field("k_pe")[slots.at] = widen(k_pe) / scale
    slots.scales[slots.scale_at] = scale[:, 0]


def _load(slots):
    scale = slots.scales[slots.scale_at].astype(np.float64)[:, None]
    return tuple(widen(slots.field(name)[slots.at]) * scale for name in ("ckv", "k_pe"))


def _store_by_the_layers_scale(slots, ckv, k_pe):
    slots.field("ckv")[slots.at] = widen(ckv) / slots.layout.scale
    slots.field("k_pe")[slots.at] = widen(k_pe) / slots.layout.scale


def _load_by_the_layers_scale(slots):
    parts = (widen(slots.field(name)[slots.at]) for name in ("ckv", "k_pe"))
    return tuple(part * slots.layout.scale for part in parts)


MADE_UP = {
    "powers": (ScaleTensor.PER_TOKEN, Encoding(_store, _load)),
    "scaled": (
        ScaleTensor.SCALAR,
        Encoding(_store_by_the_layers_scale, _load_by_the_layers_scale),
    ),
}


@pytest.fixture(autouse=True)
def _formats(monkeypatch):
    for name, (scale_tensor, encoding) in MADE_UP.items():
        stored = CacheFormat(name, "float16", "float16", scale_tensor=scale_tensor)
        monkeypatch.setitem(FORMATS, name, stored)
        monkeypatch.setitem(ENCODINGS, name, encoding)


def _step(cache_format="powers", **more):
    """A row of 5 tokens in blocks 4 and 1 of 4 slots; its last 2 tokens are this step's."""
    made = scene([request(5, 1)], [3])
    problem = replace(made.problem, cache_format=cache_format, num_blocks=6, **more)
    batch = replace(made.batch, block_table=np.array([[4, 1]], np.int32))
    return problem, batch, poisoned_image(problem.layout)


def test_a_token_and_its_scale_by_hand():
    """S-11: 6 is 0.75 times 8; the scale of slot 6 is the third of block 1."""
    layout = problem_of(cache_format="powers").layout
    image = poisoned_image(layout, np.array([1]))
    before = image.blocks.copy()
    ckv, k_pe = np.array([[6.0, -3.0, 0.5, 0.0]]), np.array([[1.0, -2.0]])
    after = write_slots(image, np.array([6]), ckv, k_pe)
    assert layout.scales(after.blocks)[0, 2] == 8
    row = layout.rows(after.blocks)[0, 2].view(np.float16)
    assert row.tolist() == [0.75, -0.375, 0.0625, 0.0, 0.125, -0.25]
    same = after.blocks == before
    layout.rows(same.view(np.uint8))[0, 2] = True
    layout.scale_bytes(same.view(np.uint8))[0, 2] = True
    assert same.all()
    assert image.blocks.tobytes() == before.tobytes()
    assert [x.tolist() for x in read_slots(after, np.array([6]))] == [ckv.tolist(), k_pe.tolist()]


def test_append_writes_rows_and_scales_and_nothing_else():
    """S-10: two tokens and two scales, in blocks that the image did not list."""
    problem, batch, image = _step(token_padding=2)
    after = append(problem, batch, image)
    every = np.arange(6)
    changed = after.read(every) != image.read(every)
    scales = problem.layout.scale_bytes(changed.view(np.uint8)).any(axis=-1)
    rows = problem.layout.rows(changed.view(np.uint8)).any(axis=-1)
    for found in (scales, rows):
        assert np.argwhere(found).tolist() == [[1, 0], [4, 3]]
    for place in (problem.layout.rows, problem.layout.scale_bytes):
        place(changed.view(np.uint8))[...] = 0
    assert not changed.any()


def test_gathered_tokens_are_of_the_problems_dtype():
    """S-11: what the cache holds, rounded."""
    problem, batch, image = _step(dtype="bfloat16")
    narrow = {name: getattr(batch, name).astype("bfloat16") for name in ("ckv", "k_pe")}
    step = replace(batch, **narrow, slot_mapping=np.array([0, 1]))
    image = append(problem, step, image)
    two = replace(batch, seq_lens=np.array([2], np.int32), block_table=np.array([[0]], np.int32))
    ckv, k_pe = gather_context(problem, two, image)
    assert ckv.tobytes() == narrow["ckv"].tobytes()  # 8 bits lose nothing in float16
    assert k_pe.tobytes() == narrow["k_pe"].tobytes()


@pytest.mark.parametrize("cache_format", MADE_UP)
def test_attention_sees_what_is_cached(cache_format):
    """S-5, S-11: the output is equal to the output over a plain cache with the same values."""
    more = {"cache_scale": 0.37} if cache_format == "scaled" else {}
    problem, batch, image = _step(cache_format, **more)
    one, slots = request(5, 1), np.array([16, 17, 18, 19, 4])
    answer = attend(problem, batch, write_slots(image, slots, one.ckv, one.k_pe), Rounding.EXACT)
    plain = replace(problem, cache_format="fp32", cache_scale=1.0)
    kept = as_cached(problem.layout, one.ckv, one.k_pe)
    assert 0 < np.abs(kept[0] - one.ckv).max() < 2e-3
    image = write_slots(poisoned_image(plain.layout), slots, *kept)
    np.testing.assert_allclose(
        answer.out, attend(plain, batch, image, Rounding.EXACT).out, rtol=1e-6
    )


def test_slots_are_copied_as_bytes():
    """S-10: rows and scales, odd ones too, each to its own place."""
    layout = problem_of(cache_format="powers").layout
    image = poisoned_image(layout, np.array([3]))
    layout.scales(image.blocks)[0] = [3.0, np.nan, 5.0, 7.0]  # what no store would write
    after = copy_slots(image, np.array([13, 14]), np.array([20, 23]))
    [block] = after.read(np.array([5]))[None]
    assert layout.scales(block)[0, [0, 3]].view(np.uint32).tolist() == [
        np.float32(np.nan).view(np.uint32),
        np.float32(5).view(np.uint32),
    ]
    assert layout.scales(block)[0, 1] != 3.0
    assert layout.rows(block)[0, [0, 3]].tolist() == layout.rows(image.blocks)[0, [1, 2]].tolist()


def test_branches_get_the_scales_of_their_tail():
    """S-15: the copy of a partly filled block reads as the block does."""
    problem, _, image = _step()
    one = request(3, 4)
    image = write_slots(image, np.arange(3), one.ckv, one.k_pe)
    lengths, table = np.array([3], np.int32), np.array([[0]], np.int32)
    copied = copy_tails(image, lengths, table, np.array([[[2], [5]]], np.int32))
    expected = [x.tolist() for x in read_slots(image, np.arange(3))]
    for first in (8, 20):
        found = read_slots(copied, first + np.arange(3))
        assert [x.tolist() for x in found] == expected
    fourth = problem.layout.scales(copied.read(np.array([2])))[0, 3]
    assert fourth.tobytes() == problem.layout.scales(image.read(np.array([2])))[0, 3].tobytes()


def test_a_schedule_has_the_outputs_of_the_cached_values():
    """S-19: the dense oracle knows what the format does to a key."""
    config = EngineConfig(block_size=4, num_blocks=12, max_rows=3, token_budget=8)
    requests = (ask("a", 9, 3), ask("b", 5, 2))
    plain = Scenario(name="x", why="", config=config, requests=requests)
    scenario = replace(plain, cache_format="powers")
    assert check_answers(scenario) > 3
    kept, given = (next(record(s, TINY, "float32")).exact.out for s in (scenario, plain))
    assert 0 < np.abs(kept - given).max() < 1e-2


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-60, 1e60, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(scale):
    """S-11: the layer's one scale, in float32."""
    with pytest.raises(InvalidArgument, match="cache_scale"):
        validate_problem(problem_of(cache_format="scaled", cache_scale=scale))


def test_plain_formats_ignore_the_layers_scale():
    """S-11: what is cached and read back has the bits it came with."""
    problem = problem_of(cache_scale=0.25)
    validate_problem(problem)
    one = request(3, 4)
    assert as_cached(problem.layout, one.ckv, one.k_pe)[0].tobytes() == one.ckv.tobytes()


def test_plain_formats_give_back_every_bit():
    """S-11: NaN payloads and -0.0 too."""
    ckv = np.array([[0x7F800001, 0x80000000, 1, 0xFFC12345]], np.uint32).view(np.float32)
    k_pe = np.array([[1.0, -0.0]], np.float32)
    found = as_cached(problem_of().layout, ckv, k_pe)
    assert [x.tobytes() for x in found] == [ckv.tobytes(), k_pe.tobytes()]


def test_an_image_of_nothing_is_all_poison():
    """S-9: no block is listed."""
    image = CacheImage.without_blocks(problem_of().layout, np.zeros(1, np.uint8))
    assert not image.read(np.array([0, 39])).any()
