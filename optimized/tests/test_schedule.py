from dataclasses import replace

import pytest
import torch
from mla_step import TILES, assert_close, build, dense

from paged_mla_optimized import PagedMla
from paged_mla_shared.errors import InvalidArgument

ROWS = ((90, 3), (1, 1), (0, 2), (200, 1), (33, 33))


@pytest.mark.parametrize("parts", [1, 2, 3, 7, 40])
def test_any_number_of_parts(parts):
    """S-20: how often tiles are cut is no semantics; 40 parts leave some with nothing."""
    step = build(*ROWS, padded_tokens=2)
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=parts))
    assert_close(step.attend(mla), dense(step))


@pytest.mark.parametrize("overhead", [0, 2, 7])
def test_any_overhead(overhead):
    """S-20: the declared cost of starting a group moves splits, and changes no output."""
    step = build(*ROWS, padded_tokens=2)
    variant = replace(TILES, programs_per_sm=5, overhead=overhead)
    assert_close(step.attend(PagedMla(step.config, "cpu", variant=variant)), dense(step))


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("tile_m", [16, 64])
@pytest.mark.parametrize("tile_n", [16, 64])
def test_any_tile(tile_m, tile_n, lanes):
    """S-20: tile sizes and lanes are no semantics, odd numbers of query tiles included."""
    step = build(*ROWS, num_heads=12)
    variant = replace(TILES, tile_m=tile_m, tile_n=tile_n, lanes=lanes, programs_per_sm=6)
    assert_close(step.attend(PagedMla(step.config, "cpu", variant=variant)), dense(step))


def test_the_last_pair_of_a_tile_alone_sees_a_key_tile():
    """S-4: with five heads 16 pairs end with one of the fourth token; its own key is the 33rd."""
    step = build((35, 6), num_heads=5)
    assert_close(step.attend(PagedMla(step.config, "cpu", variant=TILES)), dense(step))


def test_min_units_bounds_the_cutting():
    """S-20: a minimum for parts leaves the rest of the grid idle, and the output unchanged."""
    step = build((200, 1))
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=40, min_units=5))
    assert_close(step.attend(mla), dense(step))


def test_block_ids_do_not_matter():
    """S-19: the same row in other physical blocks has the same bits."""
    step = build((70, 3), (33, 1))
    before = step.attend()
    order = torch.randperm(len(step.cache), generator=torch.Generator().manual_seed(9))
    step.cache = step.cache[order.argsort()].contiguous()
    used = step.block_table < 2**31 - 1
    step.block_table[used] = order[step.block_table[used].long()].int()
    after = step.attend()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])


def test_replay_forgets_the_step_before():
    """S-17: after longer, shorter and idle steps one instance gives the bits of a new one."""
    steps = [build(*rows) for rows in (((70, 1),) * 8, ((20, 3),), ((0, 1),), ((40, 20), (65, 2)))]
    mla = PagedMla(steps[0].config, "cpu")
    for step in steps:
        for used, fresh in zip(step.attend(mla), step.attend(), strict=True):
            assert torch.equal(used, fresh)


def test_stale_workspace_is_never_read():
    """S-9: NaN in every buffer the step did not write changes nothing."""
    step = build(*ROWS)
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=7))
    before = step.attend(mla)
    mla.workspace.fill_(torch.nan)
    assert torch.equal(step.attend(mla)[0], before[0])


def test_two_instances_share_one_workspace():
    """S-9: nothing in the workspace outlives a call, whoever used it in between."""
    step, other = build(*ROWS), build((77, 5), (190, 1), num_heads=3, seed=1)
    mla = PagedMla(step.config, "cpu")
    guest = PagedMla(other.config, "cpu", workspace=mla.workspace)
    before, theirs = step.attend(mla), other.attend()
    for _ in range(2):
        for mine, expected in ((step.attend(mla), before), (other.attend(guest), theirs)):
            assert torch.equal(mine[0], expected[0])
    with pytest.raises(InvalidArgument, match="workspace"):
        PagedMla(step.config, "cpu", workspace=mla.workspace[:-1])


@pytest.mark.parametrize(
    ("rows", "heads", "cut"),
    [
        (((64, 1),) * 63, 4, [64, 1, 252, 0]),
        (((256, 1),), 4, [4, 1, 16, 0]),
        (((128, 1), (256, 0), (128, 1)), 4, [4, 1, 16, 0]),
        (((256, 1), (16, 1), (0, 1), (100, 3)), 4, [7, 1, 27, 1]),
        (((256, 4), (128, 4)), 16, [26, 4, 26, 1]),
        (((256, 2),), 16, [8, 2, 16, 0]),
        (((128, 1),) * 2, 16, [4, 1, 16, 0]),
    ],
    ids=["whole-rows", "equal-pieces", "idle-row", "ragged", "four-lanes", "two-lanes", "one-lane"],
)
def test_the_plan_chooses_lanes_and_shares(rows, heads, cut):
    """Units of a part, lanes, units, overhead; ``explain`` returns the same."""
    step = build(*rows, num_heads=heads, max_rows=64)
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=4, lanes=4))
    mla.plan(step.described)
    assert mla._core.plan.cut.tolist() == cut
    explanation = mla.explain(step.described)
    assert [explanation.part_units, explanation.lanes, explanation.units] == cut[:3]


@pytest.mark.parametrize("queries", [1, 2, 3, 4])
def test_lanes_of_rows_that_differ(queries):
    """A group may have fewer query tiles than lanes, and an odd number of tokens in each."""
    step = build((90, queries), (200, 4), (33, queries), num_heads=12)
    mla = PagedMla(step.config, "cpu", variant=replace(TILES, programs_per_sm=8, lanes=4))
    assert_close(step.attend(mla), dense(step))


@pytest.mark.parametrize("programs", [4, 5, 9, 23])
@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_programs_without_work_are_evenly_spread(programs, lanes):
    """All lanes of a part have its units, and of any neighbours as many have none."""
    step = build(*((64, lanes),) * 4, num_heads=16)
    variant = replace(TILES, programs_per_sm=programs, lanes=4, overhead=0)
    mla = PagedMla(step.config, "cpu", variant=variant)
    mla.plan(step.described)
    length, chosen, units, _ = mla._core.plan.cut.tolist()
    shares = mla._core.plan.shares.tolist()
    assert chosen == lanes
    parts = [[begin, min(begin + length, units)] for begin in range(0, units, length)]
    assert [share[:2] for share in shares if share[0] < share[1]] == sorted(parts * lanes)
    in_lanes = shares[: programs // lanes * lanes]
    assert len({partial for *_, partial in in_lanes}) == len(in_lanes)
    busy = [unit < end for unit, end, *_ in in_lanes[::lanes]]
    for width in range(1, len(busy)):
        counts = {sum(busy[at : at + width]) for at in range(len(busy) - width + 1)}
        assert max(counts) - min(counts) <= 1
