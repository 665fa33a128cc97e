"""`check` of layers, ranks, windows and drafts, and what `resume` takes."""

import pytest
import torch
from fp8_step import NAMES, build_fp8
from mla_step import build, config, of_fields
from test_scales import lose

from paged_mla_optimized import DraftSteps, ExtendWindow, LayerConfig, MlaLayer, PagedMla
from paged_mla_optimized.parallel import ContextParallelMla, local_len
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_optimized.tensors.values.blocks import Paging
from paged_mla_shared.errors import InvalidArgument

I32 = torch.int32
LENS = ((9, 1), (17, 5), (0, 0), (6, 0))
TOLD = {"query_lens": [1, 5, 0, 0], "max_seq_lens": [9, 17, 0, 6], "absorbed_rows": 1}


def refused(argument, call, *given, **named):
    with pytest.raises(InvalidArgument) as error:
        call(*given, **named)
    assert error.value.argument == argument
    return str(error.value)


def lengths(step, **changes):
    """Return what `plan` takes of a step, some of it changed."""
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    given = {name: getattr(step, name) for name in names} | {"num_tokens": len(step.q_nope)}
    tensors = {n: torch.tensor(v, dtype=I32) for n, v in changes.items() if n in names}
    return given | changes | tensors


def i32(*values):
    return torch.tensor(values, dtype=I32)


ILLEGAL = {
    "first-entry": ("cu_seqlens_q", {"cu_seqlens_q": [1, 1, 6, 6, 6]}),
    "descending": ("cu_seqlens_q", {"cu_seqlens_q": [0, 5, 1, 6, 6]}),
    "past-tokens": ("cu_seqlens_q", {"cu_seqlens_q": [0, 1, 7, 7, 7]}),
    "negative": ("seq_lens", {"seq_lens": [9, -17, 0, 6]}),
    "past-capacity": ("seq_lens", {"seq_lens": [9, 257, 0, 6]}),
    "short": ("seq_lens", {"seq_lens": [9, 4, 0, 6]}),
    "narrow": ("block_table", {"block_table": [[0]] * 4}),
    "negative-block": ("block_table", {"block_table": [[0, 0], [-1, 2], [0, 0], [3, 0]]}),
    "past-cache": ("block_table", {"block_table": [[0, 0], [1, 9], [0, 0], [3, 0]]}),
    "twice": ("block_table", {"block_table": [[0, 0], [1, 1], [0, 0], [3, 0]]}),
    "written-and-read": ("block_table", {"block_table": [[1, 0], [1, 2], [0, 0], [3, 0]]}),
    "written-twice": ("block_table", {"block_table": [[2, 0], [1, 2], [0, 0], [3, 0]]}),
}


@pytest.fixture
def layer():
    return MlaLayer(LayerConfig(attention=config(), qk_nope_head_dim=16, v_head_dim=32), "cpu")


@pytest.fixture
def ranks(group_of_one):
    return ContextParallelMla(config(), group_of_one, "cpu")


@pytest.mark.parametrize("of", ["layer", "ranks"])
@pytest.mark.parametrize("name", ILLEGAL)
def test_steps_no_rule_allows(of, name, request):
    """S-1, S-2, S-13: the errors of `PagedMla.check`; the unchanged step passes."""
    check, step = of_fields(request.getfixturevalue(of).check), build(*LENS)
    check(**lengths(step), num_blocks=9)
    argument, changes = ILLEGAL[name]
    refused(argument, check, **lengths(step, **changes), num_blocks=9)


@pytest.mark.parametrize(
    ("argument", "told", "message"),
    [
        ("max_seq_lens", {"max_seq_lens": [8, 16, 0, 6]}, "8 in row 0; allowed: at least 9"),
        ("max_seq_lens", {"max_seq_lens": [9, 16, 0, 6]}, "16 in row 1; allowed: at least 17"),
        ("max_seq_lens", {"max_seq_lens": [9, 17, 0, 0]}, "0 in row 3; allowed: at least 6"),
        ("query_lens", {"query_lens": [5, 1, 0, 0]}, "5 in row 0; allowed: 1, the length in"),
        ("query_lens", {"query_lens": [1, 4, 0, 0]}, "4 in row 1; allowed: 5, the length in"),
        ("query_lens", {"query_lens": [1, 0, 5, 0], "max_seq_lens": [9, 17, 5, 6]}, "in row 1"),
    ],
    ids=["a-step-behind", "one-row", "a-row-forgotten", "exchanged", "fewer", "moved"],
)
def test_a_host_with_another_step(layer, argument, told, message):
    """S-2, S-21: materialized rows would lose keys, or be attended by the plan of others."""
    step, check = build(*LENS), of_fields(layer.check)
    check(**lengths(step), **TOLD)
    check(**lengths(step), **TOLD | {"max_seq_lens": [256, 17, 0, 6]})  # an upper bound
    for absorbed_rows in (0, 1, None):
        given = TOLD | told | {"absorbed_rows": absorbed_rows}
        assert message in refused(argument, check, **lengths(step), **given)


def test_a_layer_checks_slots_masks_and_caches(layer):
    """S-10, S-11, S-14: with what `PagedMla.check` takes."""
    step, check = build(*LENS), of_fields(layer.check)
    slots = torch.tensor([4, 4, -1, -1, -1, -1])
    refused("slot_mapping", check, **lengths(step), slot_mapping=slots)
    refused("absorbed_rows", check, **lengths(step), **TOLD | {"absorbed_rows": 5})
    refused("absorbed_rows", check, **lengths(step), absorbed_rows=1)
    refused("max_query_len", check, **lengths(step), max_query_len=0)
    scaled = build_fp8("fp8_block_token", *LENS)
    layer = MlaLayer(
        LayerConfig(attention=scaled.config, qk_nope_head_dim=16, v_head_dim=32), "cpu"
    )
    check = of_fields(layer.check)
    check(**lengths(scaled), cache=scaled.cache, **TOLD)
    lose(scaled, 1, 11, 0.0)
    refused("cache.scales", check, **lengths(scaled), cache=scaled.cache, **TOLD)
    tree = config(mask="tree:qlen", max_draft_tokens=4)
    layer = MlaLayer(LayerConfig(attention=tree, qk_nope_head_dim=16, v_head_dim=32), "cpu")
    step = build((20, 2))
    for wrong in ([1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]):
        mask = torch.tensor(wrong, dtype=torch.bool)
        refused("mask", of_fields(layer.check), **lengths(step), mask=mask)


@pytest.mark.parametrize("name", NAMES)
def test_scales_of_a_rank(name, group_of_one):
    """S-11, S-18: of what the rank caches."""
    step = build_fp8(name, *LENS)
    ranks = ContextParallelMla(step.config, group_of_one, "cpu")
    check = of_fields(ranks.check)
    check(**lengths(step), cache=step.cache)
    lose(step, 1, 11, float("nan"))
    refused("cache.scales", check, **lengths(step), cache=step.cache)


@pytest.mark.parametrize(("world", "interleave"), [(1, 1), (2, 1), (2, 16), (3, 4)])
def test_places_of_a_divided_cache(world, interleave):
    """S-1, S-18: of each position, the slot on its owner; no two positions share one."""
    paging = Paging(16, None, world, interleave)
    table = torch.tensor([5, 2, 7]).numpy()
    position = torch.arange(3 * 16 * world).numpy()
    places = paging.places(table[position // paging.block_tokens], position)
    for p, place in zip(position, places, strict=True):
        slot, rank = divmod(int(place), world)
        assert rank == p // interleave % world
        local = local_len(int(p), world=world, rank=rank, interleave=interleave)
        assert slot == table[local // 16] * 16 + local % 16
    assert len(set(places)) == len(places)


def test_windows_no_rule_allows():
    """S-16: a length is 0 or more, and its window an int32."""
    window = ExtendWindow(3, 4, "cpu")
    window.check(i32(0, 7, 2**31 - 5))
    for wrong in (-1, 2**31 - 4):
        message = refused("committed", window.check, i32(0, wrong, 3))
        assert f"{wrong} in row 1" in message
    refused("committed", window.check, i32(0, 7))


def drafts():
    sizes = {"max_requests": 2, "branches": 2, "steps": 3, "prefix_width": 3, "own_width": 2}
    return DraftSteps(**sizes, block_size=4, device="cpu")


GOOD = {
    "prefix_lens": [6, 8],
    "prefix_table": [[7, 2, -1], [7, 0, 2**31 - 1]],
    "branch_blocks": [[[20, 21], [22, 23]], [[24, -1], [26, 24]]],
}


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("prefix_lens", {"prefix_lens": [-6, 8]}),
        ("prefix_lens", {"prefix_lens": [6, 13]}),
        ("prefix_table", {"prefix_table": [[7, -2, -1], [5, 0, -1]]}),
        ("prefix_table", {"prefix_table": [[7, 2, -1], [5, 30, -1]]}),
        ("prefix_table", {"prefix_table": [[7, 7, -1], [5, 0, -1]]}),
        ("branch_blocks", {"branch_blocks": [[[20, -1], [22, 23]], [[24, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[20, 21], [22, 30]], [[24, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[20, 20], [22, 23]], [[24, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[20, 21], [20, 23]], [[24, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[20, 21], [22, 23]], [[20, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[2, 21], [22, 23]], [[24, -1], [26, 24]]]}),
        ("branch_blocks", {"branch_blocks": [[[20, 21], [22, 7]], [[24, -1], [26, 24]]]}),
    ],
    ids=[
        "prefix-negative", "prefix-too-long", "no-block", "past-cache", "prefix-block-twice",
        "own-none", "own-past-cache", "own-twice", "of-two-branches", "of-two-requests",
        "own-is-the-tail", "own-is-shared",
    ],
)  # fmt: skip
def test_drafts_no_rule_allows(argument, changes):
    """S-13, S-15: branches share full blocks of prefixes, and nothing that one of them writes."""
    checked, blocks = drafts(), 30
    checked.check(*(i32(*value) for value in GOOD.values()), num_blocks=blocks)
    padded = GOOD | changes | {"prefix_lens": [0, 0]}
    checked.check(*(i32(*value) for value in padded.values()), num_blocks=blocks)
    given = [i32(*value) for value in (GOOD | changes).values()]
    refused(argument, checked.check, *given, num_blocks=blocks)
    refused("num_blocks", checked.check, *given, num_blocks=0)


def test_prefixes_that_pass_int32_with_their_drafts():
    """S-15: their lengths would wrap to below 0, which is padding."""
    sizes = {"max_requests": 1, "branches": 1, "steps": 4, "prefix_width": 2**16, "own_width": 2}
    checked, table = DraftSteps(**sizes, block_size=2**15, device="cpu"), torch.arange(2**16)
    for prefix_len in (2**31 - 5, 2**31 - 4):
        given = i32(prefix_len), table.int()[None], i32([[70000, 70001]])
        checked.fill(*given)
        if checked.seq_lens.min() > 0:
            checked.check(*given)
        else:
            assert f"{prefix_len} in request 0" in refused("prefix_lens", checked.check, *given)


def test_a_step_of_another_instance():
    """S-17: its plan has separate buffers; the sizes of another instance do not fit this plan."""
    step = build((20, 3), (33, 1))
    mlas = [PagedMla(step.config, "cpu") for _ in range(2)]
    for mla in mlas:
        mla.plan(MlaStep(**lengths(step)))
    mlas[0].resume(mlas[0].planned)
    expected = mlas[0].attend(step.q_nope, step.q_pe, step.cache)[0]
    message = refused("planned", mlas[0].resume, mlas[1].planned)
    assert "another instance" in message
    assert mlas[0].attend(step.q_nope, step.q_pe, step.cache)[0].equal(expected)
    refused("planned", mlas[0].resume, None)
