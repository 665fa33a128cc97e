"""`PAGED_MLA_CHECK=1`: every eager plan and load of a graph's inputs is held to the rules."""

from dataclasses import replace

import pytest
import torch
from fp8_step import build_fp8
from mla_step import P, R, build, config, of_fields
from test_check import TOLD, drafts, i32, lengths, refused
from test_scales import lose

from paged_mla_optimized import (
    ExtendWindow,
    HeadWeights,
    LayerConfig,
    MlaLayer,
    PagedMla,
    Prefill,
    PrefillConfig,
    RequestMap,
    StepInputs,
)
from paged_mla_optimized.engines.fastdeploy.decode import LatentAttention
from paged_mla_optimized.engines.heads import HeadsPrefill
from paged_mla_optimized.engines.sglang.rows import Rows
from paged_mla_optimized.engines.vllm.decode import Decode, FixedLengths, Step
from paged_mla_optimized.parallel import ContextParallelMla
from paged_mla_optimized.runtime import check_switch
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

ROWS = ((20, 3), (33, 1))
PREFILL = PrefillConfig(num_heads=2, softmax_scale=0.1, max_rows=4, max_tokens=16,
                        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
                        dtype=torch.float32)  # fmt: skip
LONG = torch.int64


def layer_of(attention):
    return MlaLayer(LayerConfig(attention=attention, qk_nope_head_dim=16, v_head_dim=32), "cpu")


def shared(**changes):
    """Return a step in which row 0 writes to the block that row 1 begins with."""
    return lengths(build(*ROWS), block_table=[[0, 1, 0], [1, 3, 2]], **changes)


def map_of(table):
    """Return the request map that a block table of blocks of 16 means."""
    slots = (table[..., None] * 16 + torch.arange(16, dtype=torch.int32)).flatten(1)
    return RequestMap(slots.int().contiguous(), torch.arange(len(table)))


def plan_of_ranks(group):
    return of_fields(ContextParallelMla(config(), group, "cpu").plan)


def load(**step):
    """Load a step into the inputs of a graph."""
    StepInputs(config(), "cpu", {}).load(MlaStep(**step))


def plan_with_drafts(**step):
    """Plan rows of FastDeploy, whose contexts and new tokens are counted apart."""
    new = step["cu_seqlens_q"].diff()
    attention = LatentAttention(PagedMla(config(), "cpu"))
    attention.plan(
        torch.zeros_like(new),
        step["seq_lens"] - new.to(step["seq_lens"].dtype),
        new,
        step["cu_seqlens_q"],
        step["block_table"],
        num_tokens=step["num_tokens"],
    )


def plan_as_vllm(**step):
    names = ("cu_seqlens_q", "seq_lens", "block_table", "num_tokens")
    decode = Decode(config(), "cpu", (1, 3))
    decode.check(Step(decode, *(step[name] for name in names)))
    own = step["block_table"].gather(1, step["seq_lens"][:, None].long() // 16)
    slots = torch.full((step["num_tokens"],), -1)
    slots[2] = own[0, 0] * 16 + 3
    decode.check(Step(decode, *(step[name] for name in names), slots))


def plan_as_sglang(**step):
    table = map_of(step["block_table"].clamp(0, 8) + 1)  # block 0 is padding's
    rows = Rows(config(), "cpu", table.req_to_token)
    new = step["cu_seqlens_q"].diff()
    rows.plan_extend(table.request_ids, step["seq_lens"].long(), new, step["num_tokens"])


ENTRANCES = {
    "PagedMla.plan": lambda **step: PagedMla(config(), "cpu").plan(MlaStep(**step)),
    "PagedMla.plan, map": lambda block_table, **step: PagedMla(
        config(table_multiple=2), "cpu"
    ).plan(MlaStep(block_table=map_of(block_table.clamp(0, 8)), **step)),
    "MlaLayer.plan": lambda **step: layer_of(config()).plan(MlaStep(**step)),
    "StepInputs.load": load,
    "engines.fastdeploy": plan_with_drafts,
    "engines.vllm": plan_as_vllm,
    "engines.sglang": plan_as_sglang,
}


@pytest.mark.parametrize("value", ["", "2", "true", "on", " 1"])
def test_values_of_the_variable(value, monkeypatch, group_of_one):
    """The error names the variable, wherever something is made that would have checked."""
    monkeypatch.setenv("PAGED_MLA_CHECK", value)
    for make in (
        lambda: PagedMla(config(), "cpu"),
        lambda: layer_of(config()),
        lambda: ContextParallelMla(config(), group_of_one, "cpu"),
        lambda: Prefill(PREFILL, "cpu"),
        lambda: ExtendWindow(2, 4, "cpu"),
        lambda: StepInputs(config(), "cpu", {}),
        drafts,
    ):
        message = refused("PAGED_MLA_CHECK", make)
        assert message.endswith("allowed: 0 or 1, or unset")


@pytest.mark.parametrize("name", ENTRANCES)
def test_eager_plans_and_loads_are_checked(name, monkeypatch):
    """S-13: a write to a block of two rows passes unless the variable is 1."""
    monkeypatch.delenv("PAGED_MLA_CHECK", raising=False)
    if name != "engines.vllm":  # its builder does nothing but check here
        ENTRANCES[name](**shared())
    monkeypatch.setenv("PAGED_MLA_CHECK", "0")
    ENTRANCES[name](**shared())
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    step = build(*ROWS)
    step.block_table[step.block_table > 8] = 0
    ENTRANCES[name](**lengths(step))
    argument = "slot_mapping" if name == "engines.vllm" else "block_table"
    refused(argument, ENTRANCES[name], **shared())


@pytest.mark.usefixtures("group_of_one")
def test_other_plans_are_checked(monkeypatch, group_of_one):
    """S-2, S-15, S-16, S-18, S-21: ranks, prompts, windows and drafts."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    refused("block_table", plan_of_ranks(group_of_one), **shared())
    falling = i32(0, 4, 2)
    for plan in (Prefill(PREFILL, "cpu").plan, _heads):
        refused("cu_seqlens_q", plan, falling, i32(0, 4, 8), num_tokens=8)
        refused("cu_seqlens_k", plan, i32(0, 4, 8), falling, num_tokens=8)
    refused("k_nope", _heads, i32(0, 4, 8), i32(0, 4, 9))
    refused("committed", ExtendWindow(2, 4, "cpu").fill, i32(3, -1))
    wrong = i32(6, 8), i32([7, 2, -1], [5, 0, -1]), i32([[7, 21], [22, 23]], [[24, 25], [26, 27]])
    refused("branch_blocks", drafts().fill, *wrong)
    refused("branch_blocks", drafts().copy_tails, torch.zeros(30, 4, 6), *wrong)


def _heads(starts, key_starts, num_tokens=8):
    q = torch.zeros(num_tokens, 2, 32)
    lse = torch.empty(num_tokens, 2)
    heads = HeadsPrefill(PREFILL)
    return heads.attend("new", starts, key_starts, q=q, k=q, v=q[..., :16], lse=lse)


def test_a_layer_compares_the_lengths_on_the_host(monkeypatch):
    """S-21: lengths of the step before are refused before anything is planned."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    step, layer = build((9, 1), (17, 5), (0, 0), (6, 0)), layer_of(config())
    plan = of_fields(layer.plan)
    plan(**lengths(step), **TOLD)
    positions = layer.positions.tolist()
    for argument, told in (
        ("max_seq_lens", {"max_seq_lens": [8, 16, 0, 6]}),
        ("query_lens", {"query_lens": [5, 1, 0, 0]}),
    ):
        refused(argument, plan, **lengths(step), **TOLD | told)
    assert layer.positions.tolist() == positions
    small = LayerConfig(attention=config(), qk_nope_head_dim=16, v_head_dim=32, workspace_tokens=64)
    layer = MlaLayer(small, "cpu")
    layer.warm_up(step.cache, HeadWeights(torch.randn(4, 48, R), 16))  # its own steps pass


def test_slots_and_caches_are_checked_where_they_come(monkeypatch):
    """S-1, S-10, S-11: by `append`, `attend` and `gather_context`, before they launch."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    step = build_fp8("fp8_block_token", *ROWS)
    mla, new = PagedMla(step.config, "cpu"), (torch.zeros(4, R), torch.zeros(4, P))
    mla.plan(MlaStep(**lengths(step)))
    mla.attend(step.q_nope, step.q_pe, step.cache)
    mla.append(*new, step.cache)
    small = step.cache._replace(latents=step.cache.latents[:1], scales=step.cache.scales[:1])
    refused("block_table", mla.attend, step.q_nope, step.q_pe, small)
    refused("slot_mapping", mla.append, *new, step.cache, torch.tensor([1, 1, -1, -1]))
    lose(step, 1, 7, 0.0)
    before = step.cache.latents.clone()
    refused("cache.scales", mla.append, *new, step.cache)
    refused("cache.scales", mla.attend, step.q_nope, step.q_pe, step.cache)
    refused("cache.scales", mla.gather_context, step.cache, torch.zeros(53, R), torch.zeros(53, P))
    assert step.cache.latents.equal(before)


def test_a_refused_load_copies_nothing(monkeypatch):
    """S-17: named slots are those of a tensor called so."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    inputs = StepInputs(config(), "cpu", {"slot_mapping": ((64,), LONG)})
    step = MlaStep(**shared())
    inputs.load(step, {"slot_mapping": torch.tensor([-1, -1, -1, 47])})
    before = [tensor.clone() for tensor in inputs.tensors]
    refused("slot_mapping", inputs.load, step, {"slot_mapping": torch.tensor([-1, 16, -1, 47])})
    refused("slot_mapping", inputs.load, step, {"slot_mapping": torch.tensor([-1])})
    fewer = {"slot_mapping": torch.tensor([-1])}
    refused("cu_seqlens_q", inputs.load, replace(step, num_tokens=1), fewer)
    assert all(map(torch.equal, before, inputs.tensors))


def test_nothing_waits_in_a_capture(monkeypatch):
    """S-17: a graph's plan is held by what is loaded into its inputs."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    mla, layer = PagedMla(config(), "cpu"), layer_of(config())
    monkeypatch.setattr(check_switch, "is_capturing", lambda _: True)
    mla.plan(MlaStep(**shared()))
    layer.plan(MlaStep(**shared()))
    ExtendWindow(2, 4, "cpu").fill(i32(3, -1))


INT64 = {
    **{name: ENTRANCES[name] for name in ("PagedMla.plan", "MlaLayer.plan", "StepInputs.load")},
    "PagedMla.check": lambda **step: PagedMla(config(), "cpu").check(MlaStep(**step)),
    "MlaLayer.check": lambda **step: layer_of(config()).check(MlaStep(**step)),
    "torch.ops.paged_mla.plan": lambda num_tokens, **step: _op(num_tokens, *step.values()),
    "engines.fastdeploy": plan_with_drafts,
    "engines.vllm": lambda **step: _vllm_plan(*step.values()),
}


def _op(num_tokens, *step):
    mla = PagedMla(config(), "cpu")
    torch.ops.paged_mla.plan(
        mla._core.plan.state,
        *step,
        None,
        None,
        num_tokens=num_tokens,
        max_query_len=None,
        handle=mla._handle,
    )


def _vllm_plan(*step):
    decode = Decode(config(), "cpu", (1, 3))
    decode.plan(Step(decode, *step))


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens", "block_table"])
@pytest.mark.parametrize("entrance", INT64)
def test_int64_is_refused_at_every_entrance(entrance, name):
    """S-2: its halves are not read as lengths; the error names the tensor and its type."""
    call, step = INT64[entrance], build(*ROWS)
    step.block_table[step.block_table > 8] = 0
    call(**lengths(step))
    with pytest.raises(InvalidArgument, match=r"int64; allowed: torch\.int32") as error:
        call(**lengths(step) | {name: getattr(step, name).long()})
    if not entrance.startswith("engines.fastdeploy"):  # which has names of its own
        assert error.value.argument == name


@pytest.mark.usefixtures("group_of_one")
@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens", "block_table"])
def test_int64_is_refused_by_ranks_and_explain(name, group_of_one):
    """S-2, S-18: likewise."""
    step = lengths(build(*ROWS))
    long = step | {name: step[name].long()}
    ranks = ContextParallelMla(config(), group_of_one, "cpu")
    for call in (ranks.plan, ranks.check, PagedMla(config(), "cpu").explain):
        refused(name, call, MlaStep(**long))


def test_int64_is_refused_where_there_is_no_plan():
    """S-1, S-15, S-16, S-21: prompts, windows, drafts, maps and copies of vLLM's lengths."""
    prefill, sums = Prefill(PREFILL, "cpu"), i32(0, 4, 8)
    for call in (prefill.plan, prefill.check, _heads):
        refused("cu_seqlens_q", call, sums.long(), sums, num_tokens=8)
        refused("cu_seqlens_k", call, sums, sums.long(), num_tokens=8)
    for call in (ExtendWindow(2, 4, "cpu").fill, ExtendWindow(2, 4, "cpu").check):
        refused("committed", call, torch.tensor([3, 4]))
    given = {
        "prefix_lens": i32(6, 8),
        "prefix_table": i32([7, 2, -1], [5, 0, -1]),
        "branch_blocks": i32([[20, 21], [22, 23]], [[24, 25], [26, 27]]),
    }
    copy = drafts().copy_tails
    for name, tensor in given.items():
        long = given | {name: tensor.long()}
        for call in (drafts().fill, drafts().check, lambda **g: copy(torch.zeros(30, 4, 6), **g)):
            refused(name, call, **long)
    step = lengths(build(*ROWS))
    made = map_of(step["block_table"].clamp(0, 8))
    wide = RequestMap(made.req_to_token.long(), made.request_ids)
    mla = PagedMla(config(table_multiple=2), "cpu")
    refused("req_to_token", mla.plan, MlaStep(**step | {"block_table": wide}))
    held = FixedLengths(4, "cpu")
    refused("query_start_loc", held.hold, i32(0, 1).long(), i32(1))
    refused("seq_lens", held.hold, i32(0, 1), i32(1).long())


@pytest.mark.parametrize("slots", [[5, 6], 5, torch.zeros(2), torch.zeros(3, dtype=LONG)], ids=str)
def test_slots_of_another_kind_are_refused_by_name(slots, monkeypatch):
    """S-10: with the switch on, too."""
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    mla = PagedMla(config(), "cpu")
    mla.plan(MlaStep.from_host([2], [3], [[1]], device="cpu"))
    with pytest.raises(InvalidArgument, match="slot_mapping"):
        mla.append(torch.ones(2, R), torch.ones(2, P), mla.new_cache(8), slots)
