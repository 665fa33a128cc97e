"""The cache a backend is handed before a step, and the step's mask."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from paged_mla_reference.rules.masks import decode_mask
from paged_mla_reference.rules.materialize import live_blocks, materialize
from paged_mla_shared.cases import Case, Row
from paged_mla_shared.dims import SMALL
from paged_mla_shared.inputs import build_steps
from paged_mla_shared.problem import Mask, MaskSpelling


def _step(**more):
    rows = more.pop("rows", (Row(6, 2), Row(0, 1), Row(3, 3)))
    case = Case(group="test", name="x", why="", rules=(), rows=rows, block_size=4, **more)
    return build_steps(case, SMALL, "float32")[0]


def _cells(image, block_ids):
    blocks = image.read(np.asarray(block_ids))
    return image.layout.rows(blocks).copy().view(np.float32).reshape(-1, SMALL.cached_dim)


def test_blocks_of_named_slots_are_live():
    """S-10: slots 0 and 9 name blocks 0 and 2, whoever uses them; -1 names none."""
    step = _step(rows=(Row(1, 1),) * 3)
    table = np.full_like(step.batch.block_table, 4)
    batch = replace(step.batch, block_table=table, slot_mapping=np.array([9, -1, 0]))
    assert live_blocks(replace(step, batch=batch)).tolist() == [0, 2, 4]


def test_contexts_are_stored_at_their_slots():
    """S-1: token 3 of row 0 in its first block, 4 and 5 not written yet."""
    step = _step()
    _, image = materialize(step)
    first = _cells(image, [step.batch.block_table[0, 0]])
    expected = np.hstack([step.context_ckv, step.context_k_pe])
    assert first.tolist() == expected.tolist()


def test_everything_else_is_poison():
    """S-9: even slots NaN, odd ones huge, in blocks the step uses."""
    step = _step()
    _, image = materialize(step)
    second = _cells(image, [step.batch.block_table[0, 1]])
    prompt = _cells(image, [step.batch.block_table[2, 0]])
    for cells in (second, prompt):
        assert np.isnan(cells[::2]).all()
        assert (cells[1::2] == np.float32(1e30)).all()


def test_poison_alternates_in_every_block():
    """S-9: the parity of a slot, not of its block, determines its poison."""
    step = _step(rows=(Row(4, 4),) * 8)
    _, image = materialize(step)
    assert set(image.block_ids % 2) == {0, 1}
    cells = _cells(image, image.block_ids)
    assert np.isnan(cells[::2]).all()
    assert (cells[1::2] == np.float32(1e30)).all()


def test_only_live_blocks_are_stored():
    """S-9: two blocks of row 0, one of row 2, none of the padded row or of table tails."""
    step = _step()
    expected = sorted([*step.batch.block_table[0, :2].tolist(), int(step.batch.block_table[2, 0])])
    assert live_blocks(step).tolist() == expected
    _, image = materialize(step)
    assert image.block_ids.tolist() == expected


def test_dead_blocks_alternate_nan_and_huge():
    """S-9: a block that no row uses repeats one NaN element and one huge element."""
    step = _step()
    _, image = materialize(step)
    dead = next(b for b in range(step.problem.num_blocks) if b not in image.block_ids)
    values = image.read(np.array([dead])).view(np.float32)[0]
    assert np.isnan(values[::2]).all()
    assert (values[1::2] == np.float32(1e30)).all()


def test_gaps_are_nan():
    """S-9: bytes between tokens and between blocks."""
    step = _step(token_padding=2, block_padding=4)
    _, image = materialize(step)
    per_token = SMALL.cached_dim + 2
    elements = image.blocks.view(np.float32)
    assert elements.shape[1] == 4 * per_token + 4
    assert np.isnan(elements[:, 4 * per_token :]).all()
    tokens = elements[:, : 4 * per_token].reshape(-1, per_token)
    assert np.isnan(tokens[:, SMALL.cached_dim :]).all()


def test_slots_the_engine_names_are_live():
    """S-10: blocks of explicit slots are stored, so that what is written can be compared."""
    step = _step(explicit_slots=True)
    named = step.batch.slot_mapping[step.batch.slot_mapping >= 0] // 4
    assert set(named.tolist()) <= set(live_blocks(step).tolist())


def test_a_cache_past_32_bits():
    """S-1: 2^33 elements, three blocks stored."""
    step = _step(cache_elements=2**33)
    _, image = materialize(step)
    assert image.blocks.shape[0] == 3
    assert image.block_ids.min() * image.layout.block_stride > 2**34


def test_a_shared_prefix_is_written_once():
    """S-13: two rows read one block; its contents are the context of both."""
    step = _step(rows=(Row(6, 1), Row(7, 2, shares_prefix_of=0)))
    _, image = materialize(step)
    table = step.batch.block_table
    assert table[0, 0] == table[1, 0]
    expected = np.hstack([step.context_ckv[:4], step.context_k_pe[:4]])
    assert _cells(image, [table[0, 0]]).tolist() == expected.tolist()


@pytest.mark.parametrize("spelling", MaskSpelling)
def test_the_mask_is_respelled(spelling):
    """S-14: the batch carries the problem's spelling of the step's trees."""
    rows = (Row(6, 3), Row(0, 2), Row(5, 4))
    step = _step(rows=rows, mask=Mask.TREE, mask_spelling=spelling, padded_tokens=2)
    batch, _ = materialize(step)
    flat = np.concatenate(
        [matrix.ravel() for i, matrix in enumerate(decode_mask(step.problem, batch)) if i != 1]
    )
    assert flat.tolist() == [*step.batch.mask[:9].tolist(), *step.batch.mask[13:].tolist()]


@pytest.mark.parametrize("spelling", MaskSpelling)
def test_the_mask_is_as_strided_as_the_rest(spelling):
    """S-9: in every spelling."""
    more = {"mask": Mask.TREE, "mask_spelling": spelling}
    (dense, _), (batch, _) = (materialize(_step(strided_inputs=s, **more)) for s in (False, True))
    assert (batch.mask == dense.mask).all()
    assert batch.mask.strides[-1] == 2 * dense.mask.strides[-1]


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_block_token", "fp8_block_group"])
def test_scales_may_be_powers_of_two(cache_format):
    """S-11: of the context, rounded up; codes and poison are those of other cases."""
    (_, plain), (_, image) = (
        materialize(_step(cache_format=cache_format, powers_of_two=p)) for p in (False, True)
    )
    layout = image.layout
    inline = bool(layout.format.inline_scales)
    first, scales = (
        layout.field(x.blocks, "ckv_scale")[:, 0] if inline else layout.scales(x.blocks)[:, 0]
        for x in (plain, image)
    )
    written = (first > 0) & (first < 1e30)
    assert written.any()
    assert not written.all()
    assert (np.frexp(first[written])[0] != 0.5).all()
    assert (np.frexp(scales[written])[0] == 0.5).all()
    assert ((scales[written] > first[written]) & (scales[written] < 2 * first[written])).all()
    assert scales[~written].tobytes() == first[~written].tobytes()
    assert (
        layout.field(image.blocks, "ckv").tobytes() == layout.field(plain.blocks, "ckv").tobytes()
    )
