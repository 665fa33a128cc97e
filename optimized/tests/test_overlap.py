"""What a call writes shares no memory with anything else of the call (S-10, S-17)."""

import pytest
import torch
from mla_step import P, R, assert_close, build, dense
from prefill_step import build as build_prefill

from paged_mla_optimized import (
    DraftSteps,
    HeadWeights,
    LatentCache,
    LayerConfig,
    MlaLayer,
    PagedMla,
    Prefill,
    RequestMap,
    StepInputs,
)
from paged_mla_optimized.tensors.overlap import check_apart, check_places
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument

N, V = 16, 32


def in_one_buffer(first, second, behind=4):
    """Return copies of two tensors; the second begins so many bytes behind where the first does."""
    room = torch.zeros(max(first.nbytes, behind + second.nbytes), dtype=torch.uint8)
    placed = []
    for tensor, start in ((first, 0), (second, behind)):
        flat = room[start : start + tensor.nbytes].view(tensor.dtype)
        placed.append(flat.view(tensor.shape))
    for tensor, copy in zip((first, second), placed, strict=True):
        copy.copy_(tensor)
    return placed


def assert_refused(call, given, written, read):
    """The call refuses that two of its arguments overlap, and names both of them."""
    memory = dict(given)
    memory[read], memory[written] = in_one_buffer(given[read], given[written])
    before = memory[written].clone()
    with pytest.raises(InvalidArgument) as error:
        call(memory)
    assert str(error.value) == (
        f"{written}: got memory that overlaps {read}; allowed: memory that does not overlap {read}"
    )
    torch.testing.assert_close(memory[written], before, rtol=0, atol=0, equal_nan=True)


def planned(**changes):
    step = build((20, 3), (33, 1), **changes)
    mla = PagedMla(step.config, "cpu")
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
    return step, mla


def answers(tokens, heads, width):
    return {"out": torch.zeros(tokens, heads, width), "lse": torch.zeros(tokens, heads)}


@pytest.mark.parametrize("read", ["q_nope", "q_pe", "cache"])
@pytest.mark.parametrize("written", ["out", "lse"])
def test_answers_over_what_attend_reads(written, read):
    """S-5: a query tile would read outputs of another tile."""
    step, mla = planned()
    given = {"q_nope": step.q_nope, "q_pe": step.q_pe, "cache": step.cache} | answers(4, 4, R)
    assert_refused(lambda m: mla.attend(**m), given, written, read)


def test_answers_over_each_other():
    """S-7."""
    step, mla = planned()
    given = answers(4, 4, R)
    attend = lambda m: mla.attend(step.q_nope, step.q_pe, step.cache, **m)  # noqa: E731
    assert_refused(attend, given, "out", "lse")


def test_answers_over_the_queries_themselves():
    """S-5: in place, at the same address; a layout that has passed before is looked at again."""
    step, mla = planned()
    expected = mla.attend(step.q_nope, step.q_pe, step.cache, **answers(4, 4, R))
    with pytest.raises(InvalidArgument, match="out: got memory that overlaps q_nope"):
        mla.attend(step.q_nope, step.q_pe, step.cache, out=step.q_nope)
    assert_close(mla.attend(step.q_nope, step.q_pe, step.cache), expected)


@pytest.mark.parametrize("written", ["out", "lse"])
def test_answers_over_the_block_table(written):
    """S-9: the table is read by attend, too."""
    step, mla = planned()
    given = answers(4, 4, R) | {"block_table": step.block_table}
    given["block_table"], given[written] = in_one_buffer(step.block_table, given[written])
    mla.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, given.pop("block_table"), num_tokens=4))
    with pytest.raises(InvalidArgument, match=f"{written}: got memory that overlaps block_table"):
        mla.attend(step.q_nope, step.q_pe, step.cache, **given)


@pytest.mark.parametrize("name", ["q_nope", "out", "lse"])
def test_no_argument_overlaps_the_workspace(name):
    """S-17: attend writes partial results there."""
    step, mla = planned()
    given = {"q_nope": step.q_nope} | answers(4, 4, R)
    place = mla.workspace[: given[name].numel()].view(given[name].shape)
    given[name] = place.copy_(given[name])
    with pytest.raises(InvalidArgument, match=f"workspace: got memory that overlaps {name}"):
        mla.attend(q_pe=step.q_pe, cache=step.cache, **given)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "seq_lens"])
def test_lengths_that_an_earlier_plan_wrote(name):
    """S-2: plan would write them while it reads."""
    step, mla = planned()
    lengths = {"cu_seqlens_q": step.cu_seqlens_q, "seq_lens": step.seq_lens}
    lengths[name] = mla.cu_seqlens_k[: len(lengths[name])]
    with pytest.raises(InvalidArgument, match=f"the plan's own buffers: got .* overlaps {name}"):
        mla.plan(MlaStep(**lengths, num_tokens=4, block_table=step.block_table))


@pytest.mark.parametrize("value", ["0", "1"])
def test_lengths_that_an_earlier_plan_of_a_layer_wrote(value, monkeypatch):
    """S-2: whether its values are checked or not."""
    monkeypatch.setenv("PAGED_MLA_CHECK", value)
    step = build((20, 3), (33, 1))
    layer = MlaLayer(LayerConfig(attention=step.config, qk_nope_head_dim=16, v_head_dim=16), "cpu")
    lengths = {"cu_seqlens_q": step.cu_seqlens_q, "seq_lens": step.seq_lens}
    layer.plan(MlaStep(**lengths, num_tokens=4, block_table=step.block_table))
    lengths["seq_lens"] = layer._core.plan.row_lens[:2]
    with pytest.raises(InvalidArgument, match=r"the plan's own buffers: got .* overlaps seq_lens"):
        layer.plan(MlaStep(**lengths, num_tokens=4, block_table=step.block_table))


def test_a_table_that_an_earlier_plan_built():
    """S-9: the next plan may take it, since it is read where it is."""
    step, _ = planned()
    slots = torch.zeros(2, 64, dtype=torch.int32)
    for row, blocks in enumerate(step.block_table):
        slots[row, ::16] = blocks[:1].repeat(4) * 16
        slots[row, : 16 * len(blocks) : 16] = blocks.clamp(max=len(step.cache) - 1) * 16
    step, mla = planned(table_multiple=1)
    lengths = (step.cu_seqlens_q, step.seq_lens)
    mla.plan(MlaStep(*lengths, RequestMap(slots, torch.tensor([0, 1])), num_tokens=4))
    mla.plan(MlaStep(*lengths, mla.block_table, num_tokens=4))
    assert_close(mla.attend(step.q_nope, step.q_pe, step.cache), dense(step))


@pytest.mark.parametrize("read", ["ckv", "k_pe", "slot_mapping"])
def test_latents_inside_the_cache(read):
    """S-10: a token may be written before another is read."""
    step, mla = planned()
    given = {"ckv": torch.ones(4, R), "k_pe": torch.ones(4, P), "cache": step.cache}
    given["slot_mapping"] = torch.arange(4)
    assert_refused(lambda m: mla.append(**m), given, "cache", read)


@pytest.mark.parametrize(("written", "read"), [("cache.scales", "ckv"), ("cache", "cache.scales")])
def test_scales_of_a_cache(written, read):
    """S-11: scales are written, too."""
    step, mla = planned(cache_format="fp8_block_token")
    blocks, size = step.cache.shape[:2]
    given = {"ckv": torch.zeros(4, R), "cache": torch.zeros(blocks, size, R + P).byte()}
    given["cache.scales"] = torch.ones(blocks, 1, size)

    def append(memory):
        cache = LatentCache("fp8_block_token", memory["cache"], memory["cache.scales"])
        mla.append(memory["ckv"], torch.zeros(4, P), cache)

    assert_refused(append, given, written, read)


@pytest.mark.parametrize(
    ("written", "read"), [("ckv", "cache"), ("k_pe", "cache"), ("ckv", "k_pe")]
)
def test_gathered_tokens(written, read):
    """S-9."""
    step, mla = planned()
    given = {"ckv": torch.zeros(53, R), "k_pe": torch.zeros(53, P), "cache": step.cache}
    assert_refused(lambda m: mla.gather_context(**m), given, written, read)


@pytest.mark.parametrize("read", ["q_nope", "q_pe", "cache", "weights.w_uk", "weights.w_uv"])
@pytest.mark.parametrize("written", ["out", "lse"])
def test_answers_over_what_a_layer_reads(written, read):
    """S-21: also where all rows are absorbed, and queries are projected first."""
    step = build((20, 3), (33, 1), num_heads=2)
    config = LayerConfig(attention=step.config, qk_nope_head_dim=N, v_head_dim=V)
    layer = MlaLayer(config, "cpu")
    layer.plan(MlaStep(step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4))
    given = {"q_nope": torch.zeros(4, 2, N), "q_pe": step.q_pe, "cache": step.cache}
    given |= {"weights.w_uk": torch.zeros(2, N, R), "weights.w_uv": torch.zeros(2, V, R)}

    def attend(memory):
        weights = HeadWeights.of_halves(memory.pop("weights.w_uk"), memory.pop("weights.w_uv"))
        layer.attend(**memory, weights=weights)

    assert_refused(attend, given | answers(4, 2, V), written, read)


@pytest.mark.parametrize("read", ["q_nope", "q_pe", "k_nope", "k_pe", "v"])
@pytest.mark.parametrize("written", ["out", "lse"])
def test_answers_over_what_a_prefill_reads(written, read):
    """S-5."""
    step = build_prefill((20, 3), (33, 1))
    prefill = Prefill(step.config, "cpu")
    step.plan(prefill)
    names = ("q_nope", "q_pe", "k_nope", "k_pe", "v")
    given = dict(zip(names, step.tensors, strict=True))
    tokens, heads = step.q_nope.shape[:2]
    given |= answers(tokens, heads, step.v.shape[2])
    assert_refused(lambda m: prefill.attend(**m), given, written, read)


def drafts_of(prefix_width=3):
    sizes = {"max_requests": 2, "branches": 2, "steps": 2, "own_width": 2, "block_size": 4}
    return DraftSteps(**sizes, prefix_width=prefix_width, device="cpu")


def test_prefixes_that_the_drafts_write():
    """S-15: the table of an earlier draft is no prefix table of the next."""
    drafts, ints = drafts_of(), torch.int32
    given = (torch.zeros(2, dtype=ints), drafts.block_table[:2, :3])
    with pytest.raises(InvalidArgument, match="block_table: got memory that overlaps prefix_table"):
        drafts.fill(*given, torch.zeros(2, 2, 2, dtype=ints))


@pytest.mark.parametrize("read", ["prefix_lens", "prefix_table", "branch_blocks"])
def test_tables_inside_the_cache_of_tails(read):
    """S-15."""
    given = {"cache": torch.zeros(8, 4, 6), "prefix_lens": torch.zeros(2).int()}
    given |= {"prefix_table": torch.zeros(2, 3).int(), "branch_blocks": torch.zeros(2, 2, 2).int()}
    assert_refused(lambda m: drafts_of().copy_tails(**m), given, "cache", read)


def inputs_of(step):
    tokens = {"ids": ((64,), torch.int64), "slots": ((64,), torch.int64)}
    inputs = StepInputs(step.config, "cpu", tokens)
    ones = torch.ones(4, dtype=torch.int64)
    lengths = (step.cu_seqlens_q, step.seq_lens, step.block_table)
    inputs.load(MlaStep(*lengths, num_tokens=4), {"ids": ones, "slots": ones})
    return inputs


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("seq_lens", lambda inputs: inputs.seq_lens[1:3]),
        ("seq_lens", lambda inputs: inputs.cu_seqlens_q[1:3]),
        ("block_table", lambda inputs: inputs.block_table[1:3, :3]),
        ("ids", lambda inputs: inputs.tokens["ids"][1:5]),
        ("ids", lambda inputs: inputs.tokens["slots"][:4]),
        ("ids", lambda inputs: inputs.tokens["ids"][:8:2]),
    ],
)
def test_inputs_are_not_loaded_from_themselves(name, taken):
    """S-17: what is read might be written by then; nothing is copied."""
    step = build((20, 3), (33, 1))
    inputs = inputs_of(step)
    before = [tensor.clone() for tensor in inputs.tensors]
    names = ("cu_seqlens_q", "seq_lens", "block_table")
    lengths, own = {n: getattr(step, n) for n in names}, {name: taken(inputs)}
    given = MlaStep(**(lengths | (own if name in names else {})), num_tokens=4)
    tokens = {} if name in names else own
    with pytest.raises(InvalidArgument, match=f"{name}: got memory of the inputs themselves"):
        inputs.load(given, tokens)
    assert all(map(torch.equal, inputs.tensors, before))


def test_inputs_that_are_in_place_are_padded():
    """S-17: an engine that writes them itself has the rest padded."""
    step = build((20, 3), (33, 1))
    inputs = inputs_of(step)
    inputs.cu_seqlens_q[3:] = 7
    inputs.tokens["ids"][4:] = 7
    lengths = (inputs.cu_seqlens_q[:3], inputs.seq_lens[:2], inputs.block_table[:2])
    inputs.load(MlaStep(*lengths, num_tokens=4), {"ids": inputs.tokens["ids"][:4]})
    assert inputs.cu_seqlens_q[:5].tolist() == [0, 3, 4, 4, 4]
    assert inputs.tokens["ids"][:6].tolist() == [1, 1, 1, 1, -1, -1]


def test_slices_of_one_buffer_are_apart():
    """S-5: queries and outputs that are interleaved by token do not overlap."""
    step, mla = planned()
    line = torch.full((4, 4, R + P + R + 2), torch.nan)
    q_nope, q_pe, out, lse, _ = line.split([R, P, R, 1, 1], dim=-1)
    q_nope.copy_(step.q_nope)
    q_pe.copy_(step.q_pe)
    assert_close(mla.attend(q_nope, q_pe, step.cache, out=out, lse=lse[..., 0]), dense(step))


def test_neighbours_in_one_buffer_are_apart():
    """S-5: the first byte of one is the one behind the last of the other."""
    step, mla = planned()
    out = torch.zeros(4, 4, R)
    q_nope, out = in_one_buffer(step.q_nope, out, behind=step.q_nope.nbytes)
    assert_close(mla.attend(q_nope, step.q_pe, step.cache, out=out), dense(step))


@pytest.mark.parametrize(
    ("shape", "strides", "gap", "are_apart"),
    [
        ((4096, 128, 512), (128 * 1088, 1088, 1), 576, True),  # out behind q, DeepSeek's heads
        ((4096, 128, 513), (128 * 1088, 1088, 1), 512, False),
        ((4096, 128, 512), (128 * 1088, 1088, 1), 577, False),  # into the next head's queries
        ((10**5, 64, 576), (61 * 64 * 576, 576, 1), 64 * 576, True),  # layers in one cache
        ((10**5, 64, 576), (61 * 64 * 576, 576, 1), 64 * 576 - 1, False),
        ((4096, 64, 512), (128 * 512, 1024, 1), 512, True),  # even and odd heads
    ],
)
def test_slices_of_large_buffers(shape, strides, gap, are_apart):
    """S-9: decided fast for all sizes, and exactly."""
    room = torch.empty(1 << 42, dtype=torch.bfloat16, device="meta")  # which has addresses alone
    written, read = (room.as_strided(shape, strides, start) for start in (8, 8 + gap))
    if are_apart:
        check_apart({"out": written}, {"q_nope": read})
    else:
        with pytest.raises(InvalidArgument, match="out: got memory that overlaps q_nope"):
            check_apart({"out": written}, {"q_nope": read})


PLACES = {
    "dense": ((2, 3, 4), (12, 4, 1), True),
    "transposed": ((3, 2, 4), (4, 12, 1), True),
    "columns": ((2, 3, 4), (30, 10, 1), True),
    "one-line": ((1, 3, 4), (0, 4, 1), True),
    "empty": ((0, 3, 4), (0, 0, 0), True),
    "repeated-tokens": ((2, 3, 4), (0, 4, 1), False),
    "repeated-heads": ((2, 3, 4), (4, 0, 1), False),
    "windows": ((5, 3, 4), (4, 4, 1), False),
    "windows-of-elements": ((5, 4), (1, 1), False),
    "lines-that-overlap": ((3, 4), (3, 1), False),
}


@pytest.mark.parametrize(("shape", "strides", "is_right"), PLACES.values(), ids=PLACES)
def test_each_element_has_a_place(shape, strides, is_right):
    """S-10: memory that is written twice has the last value."""
    tensor = torch.as_strided(torch.zeros(200), shape, strides)
    if is_right:
        check_places(out=tensor)
    else:
        with pytest.raises(InvalidArgument, match="out: got strides"):
            check_places(out=tensor)


@pytest.mark.parametrize("name", ["out", "lse", "cache"])
def test_windows_are_refused(name):
    """S-10: as repeated elements are, at the calls that write."""
    step, mla = planned()
    if name == "cache":
        flat = torch.zeros(4000)
        cache = torch.as_strided(flat, (4, 16, R + P), (16 * (R + P), R, 1))
        with pytest.raises(InvalidArgument, match="cache: got strides"):
            mla.append(torch.zeros(4, R), torch.zeros(4, P), cache)
        return
    shape, strides = ((4, 4, R), (R, R, 1)) if name == "out" else ((4, 4), (1, 1))
    window = torch.as_strided(torch.zeros(400), shape, strides)
    with pytest.raises(InvalidArgument, match=f"{name}: got strides"):
        mla.attend(step.q_nope, step.q_pe, step.cache, **{name: window})


@pytest.mark.parametrize("name", ["positions", "slot_mapping"])
def test_answers_in_what_the_plan_fills(name):
    """S-9: the next call would read it as positions and slots."""
    step, mla = planned(num_heads=1, block_size=8)
    before = getattr(mla, name).clone()
    lse = getattr(mla, name).view(torch.float32)[:4, None]
    with pytest.raises(
        InvalidArgument, match="lse: got memory that overlaps the buffers of plan 0"
    ):
        mla.attend(step.q_nope, step.q_pe, step.cache, lse=lse)
    cache = mla._core.plan.state.view(torch.float32)[: 8 * (R + P)].view(1, 8, R + P)
    with pytest.raises(InvalidArgument, match=r"cache: got memory that overlaps"):
        mla.append(torch.ones(4, R), torch.ones(4, P), cache)
    assert torch.equal(getattr(mla, name), before)


@pytest.mark.parametrize("absorbed", [0, 2])
def test_answers_of_a_layer_in_its_workspace(absorbed):
    """S-17: parts of the keys are merged there."""
    step = build((20, 3), (33, 1))
    layer = MlaLayer(LayerConfig(attention=step.config, qk_nope_head_dim=N, v_head_dim=V), "cpu")
    weights = HeadWeights(torch.randn(4, N + V, R), N)
    lengths = {"query_lens": [3, 1], "max_seq_lens": [20, 33]}
    step_of_layer = MlaStep(
        step.cu_seqlens_q, step.seq_lens, step.block_table, num_tokens=4, **lengths
    )
    layer.plan(step_of_layer, absorbed_rows=absorbed)
    queries = torch.randn(4, 4, N), torch.randn(4, 4, P)
    for room in (layer.workspace, layer.materialized.tensors["keys and values"].flatten()):
        out = room[: 4 * 4 * V].view(4, 4, V)
        with pytest.raises(InvalidArgument, match=r"out: got memory that overlaps"):
            layer.attend(*queries, step.cache, weights, out=out)
