"""Filling a step up to the shapes of a captured graph."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from reference_scenes import request, scene

from paged_mla_reference.rules.attention import attend
from paged_mla_reference.rules.cache import append
from paged_mla_reference.rules.masks import spell_mask
from paged_mla_reference.rules.padding import pad_batch
from paged_mla_reference.rules.positions import metadata
from paged_mla_reference.rules.rounding import Rounding
from paged_mla_reference.rules.validation.inputs import validate_batch
from paged_mla_shared.problem import Mask, MaskSpelling

FORK = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)


def _step(spelling=None):
    requests, contexts = [request(6, 1), request(3, 2)], [3, 0]
    if spelling is None:
        return scene(requests, contexts)
    made = scene(requests, contexts, mask=Mask.TREE)
    mask = spell_mask([FORK, FORK], spelling, made.batch.seq_lens, 64)
    problem = replace(made.problem, mask_spelling=spelling)
    return replace(made, problem=problem, batch=replace(made.batch, mask=mask))


@pytest.mark.parametrize("padded_query_len", [0, 1])
@pytest.mark.parametrize("spelling", [None, *MaskSpelling])
def test_real_tokens_keep_their_bits(spelling, padded_query_len):
    """S-6, S-17: padding to 5 rows and 12 tokens changes no real output; padding is (0, -inf)."""
    made = _step(spelling)
    padded = pad_batch(made.problem, made.batch, 5, 12, padded_query_len)
    validate_batch(made.problem, padded)
    assert (padded.num_rows, padded.num_tokens) == (5, 12)
    left = attend(made.problem, made.batch, made.image, Rounding.SPEC)
    right = attend(made.problem, padded, made.image, Rounding.SPEC)
    assert left.out.tobytes() == right.out[:6].tobytes()
    assert left.lse.tobytes() == right.lse[:6].tobytes()
    assert not right.out[6:].any()
    assert np.isneginf(right.lse[6:]).all()


def test_padding_neither_has_slots_nor_writes():
    """S-9, S-17: the padded step writes the bytes of the real one."""
    made = _step()
    padded = pad_batch(made.problem, made.batch, 5, 12, 1)
    assert metadata(made.problem, padded).slot_mapping[6:].tolist() == [-1] * 6
    expected = append(made.problem, made.batch, made.image).blocks
    assert append(made.problem, padded, made.image).blocks.tobytes() == expected.tobytes()


def test_padded_rows_are_flat_or_hold_one_token():
    """S-2: both ways of engines to fill cu_seqlens_q."""
    made = _step()
    flat = pad_batch(made.problem, made.batch, 4, 8, 0)
    assert flat.cu_seqlens_q.tolist() == [0, 3, 6, 6, 6]
    assert pad_batch(made.problem, made.batch, 4, 8).cu_seqlens_q.tolist() == [0, 3, 6, 6, 6]
    ones = pad_batch(made.problem, made.batch, 4, 8, 1)
    assert ones.cu_seqlens_q.tolist() == [0, 3, 6, 7, 8]
    assert ones.seq_lens.tolist() == [6, 3, 0, 0]
    assert (ones.block_table[2:] == 2**31 - 1).all()


def test_named_slots_are_padded_with_none():
    """S-10: padded tokens of a step with explicit slots write nothing."""
    made = _step()
    batch = replace(made.batch, slot_mapping=np.arange(6))
    assert pad_batch(made.problem, batch, 2, 8).slot_mapping.tolist() == [*range(6), -1, -1]
