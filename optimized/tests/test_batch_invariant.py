from dataclasses import replace

import pytest
import torch
from mla_step import TILES, assert_close, build, dense, join

from paged_mla_optimized import PagedMla
from paged_mla_optimized.planning import families
from paged_mla_optimized.planning.families import MAX_FIXED_SPLITS, fixed_splits, row_share
from paged_mla_optimized.planning.plan import most_joins

SPLITS = replace(TILES, programs_per_sm=7, split_tiles=2)
ROWS = ((90, 3), (1, 1), (0, 2), (200, 1), (33, 33), (250, 20))


@pytest.mark.parametrize("parts", [1, 2, 7, 40])
def test_splits_of_fixed_length_are_right(parts):
    """S-20: splits by rows give the outputs of splits by the grid, for any grid."""
    step = build(*ROWS, padded_tokens=2, batch_invariant=True)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, programs_per_sm=parts))
    assert_close(step.attend(mla), dense(step))


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["parts", "fixed"])
@pytest.mark.parametrize("num_heads", [16, 128])
def test_rows_of_several_queries_where_tokens_are_as_few_as_rows(num_heads, batch_invariant):
    """S-4, S-6: no more tokens than rows does not make every row one token long."""
    capacities = {"max_rows": 64, "max_query_tokens": 64}
    step = build(
        (200, 3), (60, 1), num_heads=num_heads, batch_invariant=batch_invariant, **capacities
    )  # fmt: skip
    assert_close(step.attend(), dense(step))


def test_bits_do_not_depend_on_batch_mates():
    """S-20: the same row has the same bits alone, first, last, and next to longer rows."""
    mates = build((200, 1), (40, 40), (77, 5), seed=1, batch_invariant=True)
    alone = build((230, 2), seed=2, batch_invariant=True)
    mla = PagedMla(alone.config, "cpu", variant=SPLITS)
    expected = alone.attend(mla)
    for order in ((0, 1), (1, 0)):
        parts = [(alone, mates)[i] for i in order]
        together = join(*parts)
        out, lse = together.attend(mla)
        first = 0 if order[0] == 0 else len(mates.q_nope)
        assert torch.equal(out[first : first + 2], expected[0])
        assert torch.equal(lse[first : first + 2], expected[1])


def test_stale_partials_are_never_read():
    """S-9: NaN in every partial the step did not write changes nothing."""
    step = build(*ROWS, batch_invariant=True)
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    before = step.attend(mla)
    mla._core.attention.partial_out.fill_(torch.nan)
    mla._core.attention.partial_lse.fill_(torch.nan)
    assert torch.equal(step.attend(mla)[0], before[0])


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["parts", "fixed"])
def test_padding_changes_no_bit(batch_invariant):
    """S-17: padded rows and tokens take no part in how the others are cut."""
    step = build((200, 1), (90, 3), batch_invariant=batch_invariant)
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    expected = step.attend(mla)
    padded = build(
        (200, 1), (90, 3), (0, 2), (0, 0), padded_tokens=5, batch_invariant=batch_invariant
    )
    padded.q_nope[:4], padded.q_pe[:4] = step.q_nope, step.q_pe
    padded.cache, padded.block_table[:2] = step.cache, step.block_table
    out, lse = padded.attend(mla)
    assert torch.equal(out[:4], expected[0])
    assert torch.equal(lse[:4], expected[1])
    assert not out[4:].any()
    assert (lse[4:] == -torch.inf).all()


def test_number_of_splits_is_bounded_by_memory():
    """Few rows may have many splits, many rows of many heads few."""
    assert fixed_splits(SPLITS, max_rows=1, kv_lora_rank=512) == MAX_FIXED_SPLITS
    tall = replace(SPLITS, tile_m=64)
    assert fixed_splits(tall, max_rows=256, kv_lora_rank=512) == 8
    assert fixed_splits(tall, max_rows=1 << 20, kv_lora_rank=512) == 1


@pytest.mark.parametrize(("max_rows", "share"), [(1, 128), (8, 16), (128, 1), (1000, 1)])
def test_rows_share_a_device(max_rows, share):
    """A row is cut for as many programs as a full batch leaves to each."""
    assert row_share(max_rows) == share


@pytest.mark.parametrize(
    ("num_heads", "query_len", "split_tiles", "splits"),
    [(8, 1, 4, 4), (16, 1, 4, 4), (16, 3, 4, 4), (16, 4, 8, 2)],
)
def test_rows_of_more_pairs_have_longer_splits(num_heads, query_len, split_tiles, splits):
    """S-20: half a query tile, one, three and four of them, in a row of 16 key tiles."""
    step = build((250, query_len), num_heads=num_heads, max_rows=128, batch_invariant=True)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, split_tiles=4))
    assert_close(step.attend(mla), dense(step))
    assert mla._core.plan.cut[5].item() == split_tiles
    assert f"up to {splits} splits" in str(mla.explain(step.described))


def test_all_programs_share_the_joins_of_splits():
    """S-8: records are of the query tiles of several splits in turn, and of none of the others."""
    step = build(
        (90, 5), (16, 1), (0, 5), (200, 1), num_heads=8, batch_invariant=True, max_rows=128
    )
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    assert_close(step.attend(mla), dense(step))
    plan = mla._core.plan
    room = fixed_splits(SPLITS, max_rows=128, kv_lora_rank=32)
    first = 2 * SPLITS.programs_per_sm  # behind two partials of each program's state
    described = [
        (first, 3, 0, 0, 16),
        (first + 3, 3, 0, 16, 16),
        (first + 6, 3, 0, 32, 8),
        (first + 3 * room, 7, 11, 0, 8),
    ]
    records = most_joins(step.config, SPLITS, 0, plan.num_rows, plan.num_tokens)
    assert records % 4 != 0  # so that not all have as many shares
    assert plan.joins[:records].tolist() == [
        [*described[record % 4], record // 4, len(range(record % 4, records, 4)), 16]
        for record in range(records)
    ]


def test_no_program_joins_rows_of_one_split():
    step = build((16, 1), (0, 2), (9, 1), batch_invariant=True, max_rows=128)
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    assert_close(step.attend(mla), dense(step))
    assert not mla._core.plan.joins[:, 1].any()


@pytest.mark.parametrize("overhead", [0, 2, 5])
@pytest.mark.parametrize("parts", [1, 3, 7, 40])
def test_shares_cut_a_split_once_at_most(parts, overhead):
    """S-20: every key tile is in one share, and a split is in one share or two consecutive ones.

    The later one comes first in the grid, and begins with the split: it never waits, and nothing
    before it in the grid waits for what comes after.
    """
    step = build((250, 1), (40, 40), (0, 1), (17, 1), batch_invariant=True)
    variant = replace(SPLITS, programs_per_sm=parts, overhead=overhead, split_tiles=3)
    mla = PagedMla(step.config, "cpu", variant=variant)
    mla.plan(step.described)
    plan = mla._core.plan
    padding, split_overhead = plan.cut[3].item(), plan.cut[4].item()
    splits, unit = [], 0
    for key_tiles, groups, length in ((16, 1, 1), (3, 10, 3), (2, 1, 1)):
        for _ in range(groups):
            for begin in range(0, key_tiles, length):
                unit += split_overhead
                splits.append(range(unit, unit + min(length, key_tiles - begin)))
                unit = splits[-1].stop
            unit += padding
    shares = plan.shares.tolist()
    for split in splits:
        owners = []  # of its key tiles
        for unit in split:
            owners += [p for p, (begin, end, *_) in enumerate(shares) if begin <= unit < end]
        assert len(owners) == len(split)
        first, last = owners[0], owners[-1]
        assert set(owners) == {first, last}
        if first != last:
            assert last < first
            assert shares[first][3] == last
            assert shares[first][1] == shares[last][0]
    assert not plan.shares[:, 4:].any()


@pytest.mark.parametrize("parts", [2, 5, 13])
@pytest.mark.parametrize("heads", [8, 40])
def test_cuts_through_splits_change_no_bit(parts, heads):
    """S-20: a split that one program begins and another ends is the sum of one program."""
    step = build((90, 3), (200, 1), (0, 1), (120, 2), num_heads=heads, batch_invariant=True)
    variant = replace(SPLITS, split_tiles=64, programs_per_sm=1)
    expected = step.attend(PagedMla(step.config, "cpu", variant=variant))
    mla = PagedMla(step.config, "cpu", variant=replace(variant, programs_per_sm=parts))
    for _ in range(2):
        for mine, whole in zip(step.attend(mla), expected, strict=True):
            assert torch.equal(mine, whole)


def test_states_are_taken_once_they_are_left():
    """S-20: the flags of states are cleared again after each launch, for the next layer."""
    step = build((250, 1), (230, 1), (190, 1), batch_invariant=True, max_rows=128)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, split_tiles=64, programs_per_sm=2))
    mla.workspace.fill_(torch.nan)
    assert_close(step.attend(mla), dense(step))
    states = mla._core.attention.partial_lse[: 2 * 2].isfinite().all(dim=1)
    assert states.tolist() == [True, True, False, False]
    assert not mla._core.plan.shares[:, 4:].any()


def test_lanes_change_no_bit():
    """S-20: other rows make the plan choose other lanes, and no bit changes."""
    variant = replace(SPLITS, lanes=4)
    alone = build((230, 4), seed=2, num_heads=16, batch_invariant=True)
    mates = build(*[(200, 1)] * 5, seed=1, num_heads=16, batch_invariant=True)
    together = join(alone, mates)
    mla = PagedMla(alone.config, "cpu", variant=variant)
    expected = alone.attend(mla)
    lanes = mla._core.plan.cut[1].item()
    out, lse = together.attend(mla)
    assert mla._core.plan.cut[1].item() != lanes
    assert torch.equal(out[:4], expected[0])
    assert torch.equal(lse[:4], expected[1])


def test_lanes_without_queries_leave_no_partials(monkeypatch):
    """S-9: next to a row of one query tile, a lane has no tile; memory there is the next row's."""
    monkeypatch.setattr(families, "MAX_FIXED_SPLITS", 4)
    rows = ((60, 1), (0, 1), (500, 4), (30, 4))
    step = build(*rows, num_heads=8, batch_invariant=True, max_rows=128, max_model_len=512)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, lanes=2, split_tiles=1))
    mla.workspace.fill_(torch.nan)
    assert_close(step.attend(mla), dense(step))
    assert mla._core.plan.cut[1].item() == 2
    lses = mla._core.attention.partial_lse[-128 * 4 :].view(128, 4, 16)
    assert lses[0, :, 0].isfinite().all()
    assert lses[1].isnan().all()


def test_many_rows_leave_one_split_for_each(monkeypatch):
    """S-20: partials of more than one would take too much room; cuts still go through a split."""
    monkeypatch.setattr(families, "MAX_FIXED_SPLITS", 1)
    step = build((150, 3), (0, 1), (90, 1), num_heads=8, batch_invariant=True)
    mla = PagedMla(step.config, "cpu", variant=replace(SPLITS, split_tiles=1, programs_per_sm=3))
    mla.workspace.fill_(torch.nan)
    assert_close(step.attend(mla), dense(step))
    assert not mla._core.plan.joins[:, 1].any()


def test_a_step_of_padding_alone():
    """S-17: without rows there is nothing to join, and padding is still blank."""
    step = build(padded_tokens=5, batch_invariant=True)
    mla = PagedMla(step.config, "cpu", variant=SPLITS)
    out, lse = step.attend(mla)
    assert not out.any()
    assert (lse == -torch.inf).all()
