"""A step as one object: from tensors or from the host, planned once, and several at a time."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mla_step import R, Step, assert_close, build, dense

from paged_mla_optimized import (
    HeadWeights,
    LayerConfig,
    MlaLayer,
    MlaStep,
    PagedMla,
    PlannedStep,
    RequestMap,
)
from paged_mla_optimized.api import planned as planned_module
from paged_mla_optimized.api.layer import PlannedLayerStep
from paged_mla_shared.errors import InvalidArgument

N, V = 16, 32
ROWS = ((20, 3), (33, 1))


def of_host(step: Step, **changes: object) -> MlaStep:
    """Return the step as a host that knows its lengths and blocks makes it."""
    keys, queries = ([pair[i] for pair in step.rows] for i in (0, 1))
    blocks = [line[: -(-n // 16)].tolist() for line, n in zip(step.block_table, keys, strict=True)]
    given = {"query_lens": queries, "seq_lens": keys, "block_table": blocks} | changes
    return MlaStep.from_host(**given, device="cpu")


def layer_of(step: Step, **more: object) -> MlaLayer:
    config = LayerConfig(attention=step.config, qk_nope_head_dim=N, v_head_dim=V)
    return MlaLayer(config, "cpu", **more)


def weights_of(step: Step) -> HeadWeights:
    generator = torch.Generator().manual_seed(9)
    return HeadWeights(torch.randn(step.config.num_heads, N + V, R, generator=generator), N)


def test_a_step_of_host_lists_is_that_of_their_tensors():
    """S-2: rows of blocks may have different lengths; all data is copied at once."""
    step = build(*ROWS, (0, 0), padded_tokens=2)
    described = of_host(step, num_tokens=6)
    assert described.cu_seqlens_q.tolist() == step.cu_seqlens_q.tolist()
    assert described.seq_lens.tolist() == step.seq_lens.tolist()
    assert described.block_table.tolist() == [
        [*step.block_table[0, :2].tolist(), -1],
        step.block_table[1, :3].tolist(),
        [-1] * 3,
    ]
    for tensor in (described.cu_seqlens_q, described.seq_lens, described.block_table):
        assert tensor.dtype is torch.int32
        assert tensor.data_ptr() % 16 == 0
    assert (described.query_lens, described.max_seq_lens) == ([3, 1, 0], [20, 33, 0])
    mla = PagedMla(step.config, "cpu")
    mla.check(described)
    mla.plan(described)
    assert_close(mla.attend(step.q_nope, step.q_pe, step.cache), dense(step))


def test_tensors_and_maps_of_a_step_of_the_host_are_taken_as_they_are():
    """S-1: an engine that keeps its block table on the device makes only lengths."""
    step = build(*ROWS)
    assert of_host(step, block_table=step.block_table).block_table is step.block_table
    request_map = RequestMap(
        torch.zeros(1, 48, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    )
    assert of_host(step, block_table=request_map).block_table is request_map


def test_a_step_without_rows():
    """S-6: an idle step."""
    step = MlaStep.from_host([], [], [], device="cpu")
    assert (step.num_rows, step.num_tokens, step.block_table.shape) == (0, 0, (0, 0))
    PagedMla(build(*ROWS).config, "cpu").plan(step)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query_lens", {"query_lens": [3, -1]}),
        ("query_lens", {"query_lens": [3.0, 1.0]}),
        ("query_lens", {"query_lens": torch.ones(2, device="meta")}),
        ("query_lens", {"query_lens": [2**31 - 1, 2**31 - 1]}),
        ("seq_lens", {"seq_lens": [20]}),
        ("seq_lens", {"seq_lens": [20, 2**31]}),
        ("block_table", {"block_table": [[0, 1]]}),
        ("block_table", {"block_table": [[0, 1], [2**31, 0, 0]]}),
        ("block_table", {"block_table": [[0, 1], 3]}),
        ("block_table", {"block_table": [[0, 1], [0.5]]}),
        ("block_table", {"block_table": None}),
        ("block_table", {"block_table": [[0, 1], [[1], [2, 3]]]}),
        ("block_table", {"block_table": [[0, 1], torch.ones(3, dtype=torch.int32, device="meta")]}),
        ("block_table", {"block_table": [[0, 1], torch.ones(3, requires_grad=True)]}),
        ("block_table", {"block_table": np.array(3)}),
        ("query_lens", {"query_lens": torch.ones(2, requires_grad=True)}),
        ("num_tokens", {"num_tokens": "4"}),
    ],
    ids=[
        "below-0", "floats", "on-a-device", "sum", "one-row", "length", "one-line", "block",
        "no-line", "fraction", "none", "lines-in-a-line", "line-on-a-device", "line-with-gradient",
        "no-axis", "gradient", "tokens",
    ],
)  # fmt: skip
def test_lists_of_no_step(argument, changes):
    """S-2: the error names the list."""
    with pytest.raises(InvalidArgument) as error:
        of_host(build(*ROWS), **changes)
    assert error.value.argument == argument


@pytest.mark.parametrize("given", [2**70, 2**31, -(2**31) - 1, -(2**70)])
def test_an_integer_out_of_range_is_named(given):
    """The error has the value that is wrong, not another one of its row."""
    step = build(*ROWS)
    with pytest.raises(InvalidArgument, match=f"block_table: got {given} in row 1; allowed: int32"):
        of_host(step, block_table=[[0, 1], [5, given, 7]])
    with pytest.raises(InvalidArgument, match=rf"seq_lens: got {given}; allowed: 0 to 2 \*\* 31"):
        of_host(step, seq_lens=[20, given])


def test_maps_and_steps_are_compared_as_objects():
    """Tensors have no single result of `==`."""
    step = build(*ROWS)
    maps = [RequestMap(step.block_table, step.seq_lens) for _ in range(2)]
    assert maps[0] == maps[0]
    assert maps[0] != maps[1]
    assert of_host(step) != of_host(step)


@pytest.mark.parametrize(
    ("argument", "changes"),
    [
        ("query_lens", {"query_lens": [2, 2]}),
        ("query_lens", {"query_lens": [3, 2]}),
        ("query_lens", {"query_lens": [4]}),
        ("max_seq_lens", {"max_seq_lens": [20, 32]}),
        ("max_seq_lens", {"max_seq_lens": [20, 257]}),
        ("max_seq_lens", {"query_lens": None}),
        ("max_query_len", {"max_query_len": 3}),
    ],
    ids=["other-rows", "past-tokens", "one-row", "short", "past-capacity", "alone", "twice"],
)
def test_a_host_that_knows_another_step(argument, changes):
    """S-2: `check` compares its lengths with those on the device."""
    step = build(*ROWS)
    mla = PagedMla(step.config, "cpu")
    mla.check(of_host(step))
    with pytest.raises(InvalidArgument) as error:
        mla.check(replace(of_host(step), **changes))
    assert error.value.argument == argument


def test_lengths_of_the_host_choose_the_kernel():
    """S-20: the longest query, as `max_query_len` does; but not where bits must not follow it."""
    step = build((20, 1), (33, 1), num_heads=16)
    mla = PagedMla(step.config, "cpu")
    longer = replace(step.described, max_query_len=3)
    known = replace(step.described, query_lens=[1, 1])
    assert mla._core.host_plan(longer, 3).query_len == 3
    mla.plan(known)
    assert mla._core.plan.host.query_len == 1
    fixed = PagedMla(replace(step.config, batch_invariant=True), "cpu")
    fixed.plan(known)
    assert fixed._core.plan.host.query_len == step.config.max_query_tokens


def test_a_step_of_another_class():
    """S-2: lengths that are given one by one, as a step is not."""
    step = build(*ROWS)
    mla, layer = PagedMla(step.config, "cpu"), layer_of(step)
    for call in (mla.plan, mla.check, mla.explain, layer.plan, layer.check, layer.explain):
        with pytest.raises(InvalidArgument, match="step: got a Tensor; allowed: a MlaStep"):
            call(step.seq_lens)


def test_steps_in_flight():
    """S-17: two planned steps, each attended to by its own plan, in any order."""
    steps = [build(*ROWS), build((40, 1), (5, 5), (60, 2))]
    mla = PagedMla(steps[0].config, "cpu", steps_in_flight=2)
    planned = [mla.plan(step.described) for step in steps]
    for step, plan in [*zip(steps, planned, strict=True)] * 2:
        answer = mla.attend(step.q_nope, step.q_pe, step.cache, planned=plan)
        assert_close(answer, dense(step))
        assert len(plan.positions) == len(plan.slot_mapping) == len(step.q_nope)
        assert plan.block_table is step.block_table
        assert plan.cu_seqlens_k[-1] == sum(n for n, _ in step.rows)
    assert_close(mla.attend(steps[1].q_nope, steps[1].q_pe, steps[1].cache), dense(steps[1]))
    mla.resume(planned[0])
    assert_close(mla.attend(steps[0].q_nope, steps[0].q_pe, steps[0].cache), dense(steps[0]))


def test_a_planned_step_whose_buffers_a_later_one_uses():
    """S-17: its tokens would be attended to by the plan of others."""
    step = build(*ROWS)
    mla = PagedMla(step.config, "cpu", steps_in_flight=2)
    first = mla.plan(step.described)
    with pytest.raises(InvalidArgument, match="seq_lens"):  # a step that is refused takes none
        mla.plan(replace(step.described, seq_lens=step.seq_lens.long()))
    mla.plan(step.described)
    mla.attend(step.q_nope, step.q_pe, step.cache, planned=first)
    mla.plan(step.described)
    latents = torch.zeros(4, R), torch.zeros(4, 16)
    for call in (
        lambda: mla.attend(step.q_nope, step.q_pe, step.cache, planned=first),
        lambda: mla.append(*latents, step.cache, planned=first),
        lambda: mla.gather_context(step.cache, *latents, planned=first),
        lambda: mla.quantize_queries(step.q_nope, step.q_pe, planned=first),
        lambda: first.positions,
        lambda: first.block_table,
    ):
        with pytest.raises(InvalidArgument, match="planned: got a step whose buffers a later step"):
            call()


@pytest.mark.parametrize("kind", ["PagedMla", "MlaLayer"])
def test_a_stale_step_that_no_graph_planned_is_not_resumed(kind):
    """S-17: its buffers describe a later step, and no replay can have brought it back."""
    step, later = build(*ROWS), build((40, 2), (5, 1), (9, 1))
    mla = PagedMla(step.config, "cpu") if kind == "PagedMla" else layer_of(step)
    first = mla.plan(step.described)
    mla.resume(first)  # its buffers are its own still
    latest = mla.plan(later.described)
    with pytest.raises(InvalidArgument, match=r"planned: got a step whose buffers .* no graph"):
        mla.resume(first)
    assert mla.planned is latest
    assert mla.block_table is later.block_table


def test_the_next_step_takes_the_buffers_that_were_used_longest_ago():
    """S-17: a step that was resumed is one of the latest, and so are those planned around it."""
    step = build(*ROWS)
    mla = PagedMla(step.config, "cpu", steps_in_flight=3)
    first, second, third = (mla.plan(step.described) for _ in range(3))
    mla.resume(first)
    fourth = mla.plan(step.described)
    for valid in (third, first, fourth):
        assert valid.positions is not None
    with pytest.raises(InvalidArgument, match="planned"):
        _ = second.positions


@pytest.mark.parametrize("given", ["another", "nothing"])
def test_what_is_no_planned_step_of_an_instance(given):
    """S-17: the buffers of another instance are made for other tiles."""
    step = build(*ROWS)
    mla, other = PagedMla(step.config, "cpu"), PagedMla(step.config, "cpu")
    mla.plan(step.described)
    planned = other.plan(step.described) if given == "another" else step.described
    with pytest.raises(InvalidArgument, match="planned"):
        mla.attend(step.q_nope, step.q_pe, step.cache, planned=planned)


def test_steps_in_flight_are_at_least_one():
    with pytest.raises(InvalidArgument, match="steps_in_flight: got 0"):
        PagedMla(build(*ROWS).config, "cpu", steps_in_flight=0)


@pytest.mark.parametrize("absorbed", [0, 1, 2])
def test_steps_of_layers_in_flight(absorbed):
    """S-21: absorbed and materialized rows have plans of their own in each step."""
    steps = [build(*ROWS), build((40, 1), (5, 5))]
    layers = layer_of(steps[0], steps_in_flight=2), layer_of(steps[0])
    weights, q = weights_of(steps[0]), torch.randn(6, 4, N)
    planned = [layers[0].plan(of_host(step), absorbed_rows=absorbed) for step in steps]
    for step, plan in [*zip(steps, planned, strict=True)] * 2:
        queries = q[: len(step.q_pe)], step.q_pe
        layers[1].plan(of_host(step), absorbed_rows=absorbed)
        expected = layers[1].attend(*queries, step.cache, weights)
        found = layers[0].attend(*queries, step.cache, weights, planned=plan)
        assert all(map(torch.equal, found, expected))
        assert plan.absorbed_rows == absorbed


@pytest.mark.parametrize("between", [0, 1, 2, None])
@pytest.mark.parametrize("absorbed", [0, 1, 2])
def test_a_resumed_step_of_layers(absorbed, between, monkeypatch):
    """S-17, S-21: a replay restores the device's buffers, and `resume` the host's sizes.

    The step between has as many tokens, in rows that are divided in another place.
    """
    step, other = build(*ROWS), build((40, 2), (5, 1), (9, 1))
    layer, weights, q = layer_of(step), weights_of(step), torch.randn(4, 4, N)
    with monkeypatch.context() as capture:
        capture.setattr(planned_module, "is_capturing", lambda _: True)
        planned = layer.plan(of_host(step), absorbed_rows=absorbed)
    expected = layer.attend(q, step.q_pe, step.cache, weights)
    buffers = [plan.state for plan in (*layer._core.plans, *layer._leading)]
    buffers += layer._first_parts[0].tensors.values()
    captured = [buffer.clone() for buffer in buffers]
    layer.plan(other.described if between is None else of_host(other), absorbed_rows=between)
    for buffer, was in zip(buffers, captured, strict=True):  # a replay
        buffer.copy_(was)
    layer.resume(planned)
    assert layer.absorbed_rows == absorbed
    for chosen in (None, planned):
        found = layer.attend(q, step.q_pe, step.cache, weights, planned=chosen)
        assert all(map(torch.equal, found, expected))


def test_a_layer_has_the_surface_of_the_attention():
    """S-1, S-17: what is read, gathered, explained and shared is the same for both."""
    step = build(*ROWS)
    mla, layer = PagedMla(step.config, "cpu"), layer_of(step)
    for name in dir(PagedMla):
        if not name.startswith("_") and name != "quantize_queries":  # of absorbed queries
            assert hasattr(layer, name), name
    planned = layer.plan(step.described)
    assert isinstance(planned, PlannedLayerStep)
    assert isinstance(mla.plan(step.described), PlannedStep)
    for name in ("positions", "slot_mapping", "block_table", "cu_seqlens_k"):
        assert getattr(layer, name).equal(getattr(mla, name))
    lines = [(torch.zeros(53, R), torch.zeros(53, 16)) for _ in range(2)]
    for instance, (ckv, k_pe) in zip((mla, layer), lines, strict=True):
        instance.gather_context(step.cache, ckv, k_pe)
    assert all(map(torch.equal, *lines))
    assert str(mla.explain(step.described)) in str(layer.explain(step.described))
    assert layer_of(step, workspace=mla.workspace).workspace is mla.workspace
    assert layer.new_cache(5).latents.shape == mla.new_cache(5).latents.shape == (5, 16, R + 16)
    assert {buffer.name for buffer in mla.memory()} < {buffer.name for buffer in layer.memory()}


def test_an_explanation_of_both_forms():
    """S-21: which rows are materialized, and in how many parts their keys come."""
    step = build((33, 1), (60, 30), max_query_tokens=32)
    layer = MlaLayer(
        LayerConfig(attention=step.config, qk_nope_head_dim=N, v_head_dim=V, workspace_tokens=50),
        "cpu",
    )
    found = layer.explain(of_host(step), absorbed_rows=1)
    assert (found.absorbed_rows, found.materialized_rows) == (1, 1)
    assert (found.materialized_keys, found.parts) == (60, 2)
    assert "1 absorbed, 1 materialized, 60 keys in 2 parts" in str(found)
    assert layer.explain(of_host(step), absorbed_rows=0).attention is None
