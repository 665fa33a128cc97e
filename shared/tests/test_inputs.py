"""The table of cases, and the poison in their inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paged_mla_shared.cases import GROUPS, MERGES, Case, Row, SlotOrder, formats
from paged_mla_shared.dims import SMALL
from paged_mla_shared.dtypes import bits
from paged_mla_shared.inputs import INT32_MAX, build_steps
from paged_mla_shared.strides import strided

ALL = [case for group in GROUPS.values() for case in group]


@pytest.mark.parametrize("group", GROUPS)
def test_no_group_is_empty(group: str):
    """A group without cases would pass without any test."""
    assert GROUPS[group]
    assert all(case.group == group for case in GROUPS[group])


def test_ids_are_unique():
    """An id names one situation."""
    ids = [case.id for case in ALL]
    assert len(ids) == len(set(ids))
    names = [case.name for case in MERGES]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_a_case_builds_the_same_bits_twice(case: Case):
    """Inputs depend only on the id."""
    first, second = (build_steps(case, SMALL, "bfloat16") for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.batch.q_nope.tobytes() == b.batch.q_nope.tobytes()
        assert a.batch.block_table.tobytes() == b.batch.block_table.tobytes()


@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_live_blocks_are_distinct_and_tails_poisoned(case: Case):
    """S-9: rows have their own blocks unless they share a prefix; other entries are invalid."""
    for step in build_steps(case, SMALL, "float32"):
        batch, size = step.batch, step.problem.block_size
        used = -(-batch.seq_lens // size)
        live = [batch.block_table[b, :n] for b, n in enumerate(used)]
        flat = np.concatenate([*live, np.zeros(0, np.int32)])
        assert ((flat >= 0) & (flat < step.problem.num_blocks)).all()
        if not any(row.shares_prefix_of is not None for row in case.rows):
            assert len(set(flat.tolist())) == len(flat)
        if case.table_tail == "int32_max":
            tails = [batch.block_table[b, n:] for b, n in enumerate(used)]
            assert all((tail == INT32_MAX).all() for tail in tails)


def test_padded_tokens_hold_nan():
    """S-9: inputs of padded tokens are NaN."""
    case = next(c for c in GROUPS["empty"] if c.name == "padded-tokens")
    [step] = build_steps(case, SMALL, "bfloat16")
    padded = int(step.batch.cu_seqlens_q[-1])
    assert np.isnan(step.batch.q_nope[padded:].astype(np.float32)).all()
    assert np.isfinite(step.batch.q_nope[:padded].astype(np.float32)).all()


def test_strided_inputs_are_views_with_poisoned_gaps():
    """S-9: the memory between the elements of a view is poisoned."""
    case = next(c for c in GROUPS["layouts"] if c.name == "strided-inputs")
    [step] = build_steps(case, SMALL, "float32")
    q_nope, table = step.batch.q_nope, step.batch.block_table
    assert not q_nope.flags.c_contiguous
    assert q_nope.base is not None
    assert np.isnan(q_nope.base).sum() == q_nope.base.size - q_nope.size
    assert table.strides[1] == 2 * table.itemsize


def test_lengths_are_strided_too():
    """S-9: a reader that ignores the strides of lengths reads invalid lengths."""
    case = next(c for c in GROUPS["layouts"] if c.name == "strided-inputs")
    [step] = build_steps(case, SMALL, "float32")
    for lengths in (step.batch.cu_seqlens_q, step.batch.seq_lens):
        assert lengths.base is not None
        assert lengths.strides == (8,)
        assert (lengths.base[1::2] == INT32_MAX).all()


def test_lines_of_bytes_are_strided_along_both_axes():
    """S-9: the gaps of a packed mask have all bits set, and those of bool masks are true."""
    lines = np.arange(6, dtype=np.uint8).reshape(2, 3)
    view = strided(lines)
    assert (view == lines).all()
    assert view.strides == (7, 2)
    assert view.base is not None
    assert (view.base == 255).sum() == view.base.size - 6
    assert strided(np.zeros(3, bool)).base.tolist() == [False, True] * 3


def test_shared_prefix_shares_blocks_and_latents():
    """S-13: two rows with one prefix read the same physical blocks."""
    case = next(c for c in GROUPS["extend"] if c.name == "shared-prefix")
    [step] = build_steps(case, SMALL, "float32")
    table = step.batch.block_table
    assert (table[0, :2] == table[1, :2]).all()
    assert (step.context_ckv[:128] == step.context_ckv[130 : 130 + 128]).all()


def test_large_caches_put_live_blocks_past_the_boundary():
    """S-1: offsets or ids of the live blocks do not fit 31, 32 or 24 bits."""
    for case in GROUPS["large_offsets"]:
        [step] = build_steps(case, SMALL, "bfloat16")
        used = -(-step.batch.seq_lens // step.problem.block_size)
        lowest = min(int(step.batch.block_table[b, :n].min()) for b, n in enumerate(used))
        if case.cache_blocks:
            assert lowest > 2**24
        else:
            boundary = 2**31 if case.name.startswith("2g") else 2**32
            assert lowest * step.problem.block_size * SMALL.cached_dim > boundary


def test_odd_values_are_there():
    """S-10: -0.0, signaling NaN, infinities and subnormal numbers, in every dtype."""
    case = next(c for c in GROUPS["append"] if c.odd_values)
    for dtype in ("float32", "float16", "bfloat16"):
        [step] = build_steps(case, SMALL, dtype)
        with np.errstate(invalid="ignore"):  # signalling NaN
            ckv = step.batch.ckv.astype(np.float64)
        infinity = int(bits(np.array([np.inf], step.batch.ckv.dtype))[0])
        assert (np.signbit(ckv) & (ckv == 0)).any()
        assert np.isinf(ckv).any()
        assert (bits(step.batch.ckv) == infinity + 1).any()
        assert ((ckv < 0) & (ckv > -1e-7)).any()


def case_of(**more: Any) -> Case:
    """Return a case of one row, with 40 tokens of context and 20 new tokens."""
    return Case(group="x", name="y", why="", rules=(), rows=(Row(60, 20),), **more)


def test_uneven_tokens_differ_in_magnitude():
    """S-11: quarters of a latent, and keys, of the context and of the step."""
    [even], [step] = (build_steps(case_of(uneven=u), SMALL, "float32") for u in (False, True))
    for before, ckv, k_pe in (
        (even, even.context_ckv, even.context_k_pe),
        (step, step.context_ckv, step.context_k_pe),
        (step, step.batch.ckv, step.batch.k_pe),
    ):
        quarters = np.abs(ckv.reshape(len(ckv), 4, -1)).max(axis=2)
        spread = [(x.max(axis=0) / x.min(axis=0)).min() for x in (quarters, np.abs(k_pe))]
        assert (min(spread) > 20) == (before is step)


def test_tokens_may_be_small():
    """S-11: factors repeat over tokens; they can be 0 or subnormal in float32."""
    [step] = build_steps(case_of(token_scales=(0.0, 1.0, 1e-40)), SMALL, "float32")
    for values in (step.context_ckv, step.context_k_pe, step.batch.ckv, step.batch.k_pe):
        largest = np.abs(values).max(axis=1)
        assert not largest[::3].any()
        assert (largest[1::3] > 0.5).all()
        assert ((largest[2::3] > 0) & (largest[2::3] < 2.0**-126)).all()


def test_keys_have_their_own_scale():
    """S-11: only the rotated part has outliers; the layer's scale is the problem's."""
    [step] = build_steps(case_of(key_scale=1e3, cache_scale=0.5), SMALL, "float32")
    for k_pe, ckv in ((step.batch.k_pe, step.batch.ckv), (step.context_k_pe, step.context_ckv)):
        assert np.abs(k_pe).max() > 1e3
        assert np.abs(ckv).max() < 10
    assert step.problem.cache_scale == 0.5


def test_coarse_numbers_have_8_bits():
    """S-11: some numbers of context and step are halfway between two numbers of 4 bits."""
    [step] = build_steps(case_of(coarse=True), SMALL, "float32")
    for values in (step.context_ckv, step.context_k_pe, step.batch.ckv, step.batch.k_pe):
        steps = np.frexp(values)[0] * 2**8
        assert (steps == np.rint(steps)).all()
        assert (steps % 16 == 8).mean() > 0.02


def test_cases_of_every_format_are_cases():
    """S-11: each case is listed once, and none is of the group that always runs in all formats."""
    named = formats.IN_EVERY_FORMAT
    assert len(set(named)) == len(named)
    assert set(named) <= {case.id for case in ALL if case.group != formats.GROUP}


def test_slots_of_the_table_order():
    """S-3: every token has its own slot; padded rows and tokens have none."""
    case = next(c for c in GROUPS["layer"] if c.slot_order is SlotOrder.TABLE)
    [step] = build_steps(case, SMALL, "float32")
    batch, size = step.batch, step.problem.block_size
    slots = []
    for row, blocks in zip(case.rows, batch.block_table.tolist(), strict=True):
        keys = range(row.seq_len - row.query_len, row.seq_len)
        own = [blocks[key // size] * size + key % size for key in keys]
        slots += own if row.seq_len else [-1] * row.query_len
    assert batch.slot_mapping.tolist() == [*slots, *[-1] * case.padded_tokens]
