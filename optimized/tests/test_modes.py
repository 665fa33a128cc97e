"""Every mode has the outputs of the plain backend, computed in its own way."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_backend import batch, loaded, problem

from paged_mla_optimized import PagedMla
from paged_mla_optimized.api import core, prefill
from paged_mla_optimized.backend import create, graphed, modes, portable
from paged_mla_optimized.planning.families import PORTABLE
from paged_mla_optimized.planning.plan import HostPlan
from paged_mla_optimized.runtime.device import DeviceFacts
from paged_mla_optimized.serving.graph import GraphedStep
from paged_mla_shared.dims import DEEPSEEK_V3
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.problem import Output

HERE = (
    "batch_invariant",
    "portable",
    "compiled",
    "request_map",
    "reserved_slot",
    "base_2",
    "fast",
    "unchecked",
)
FIXED = {"batch_invariant", "portable"}
EVERY_BLOCK = np.arange(6)


def answers(runner, *batches):
    """Return positions, slots, out, lse and the cache, after each of `batches`."""
    runner.load_cache(loaded()[1])
    found = []
    for step in batches:
        runner.append(step)
        metadata, output = runner.plan(step), runner.attend(step)
        found.append(
            [*vars(metadata).values(), *vars(output).values(), runner.read_cache(EVERY_BLOCK)]
        )
    return found


@pytest.mark.parametrize("name", HERE)
def test_a_mode_has_the_outputs_of_the_plain_backend(name):
    """S-19: positions, slots and bytes are equal, and outputs up to the order of sums."""
    [expected] = answers(create().prepare(problem()), batch())
    [found] = answers(getattr(modes, name)().prepare(problem()), batch())
    if name == "base_2":
        found[3] = found[3] * np.float32(np.log(2))
    for mine, theirs in zip(found, expected, strict=True):
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
        else:
            np.testing.assert_array_equal(mine, theirs)


def test_modes_declare_what_they_do():
    """Their names differ in reports; two declare equal bits, also of prefill; one has no merge."""
    plain = create()
    for name in HERE:
        mode = getattr(modes, name)()
        assert mode.name == f"{plain.name} {name}"
        extra = {"batch_invariant"} if name in FIXED else set()
        own = {"base_2": {"layer", "prefill", "merge"}, **{fixed: {"layer"} for fixed in FIXED}}
        own["unchecked"] = set()
        lacking = own.get(name, {"layer", "prefill"})
        features = plain.capabilities.features | extra
        if name == "unchecked":
            features -= {"validation"}
        assert mode.capabilities.features == features
        assert mode.capabilities.ops == plain.capabilities.ops - lacking


@pytest.mark.parametrize("name", ["create", "request_map", "compiled"])
def test_an_unchecked_runner_does_not_check(monkeypatch, name):
    """S-2: the output of a legal step is unchanged, and its values are not checked."""
    mode = create() if name == "create" else getattr(modes, name)()
    [expected] = answers(mode.prepare(problem()), batch())
    monkeypatch.setattr(PagedMla, "check", None)
    [found] = answers(mode.prepare_unchecked(problem()), batch())
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("cache_format", ["fp16", "fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("most_tokens", [4, 64], ids=["decode", "longer"])
def test_portable_steps_have_no_other_kernel(monkeypatch, cache_format, num_heads, most_tokens):
    """S-20: on Hopper and in prefill too; a plain backend in the same process is not changed."""
    for module in (core, prefill, portable):
        monkeypatch.setattr(module, "device_facts", lambda _device: DeviceFacts("sm90", 132))
    asked = problem(
        dims=DEEPSEEK_V3.with_heads(num_heads),
        dtype="float16",
        cache_format=cache_format,
        max_rows=4,
        max_query_tokens=most_tokens,
    )
    for mode, is_portable in (
        (modes.portable, True),
        (create, False),
        (modes.batch_invariant, False),
    ):
        runner = mode().prepare(asked)
        assert {v.family == PORTABLE for v in runner._mla._core.variants} == {is_portable}
        assert (runner._prefill_of(causal=True)._hopper is None) is is_portable


@pytest.mark.parametrize("most_tokens", [4, 64], ids=["decode", "longer"])
def test_portable_steps_have_the_tiles_that_the_portable_family_chooses(most_tokens):
    """S-20: the one variant is what batch-invariant steps choose where no other family is."""
    asked = problem(max_rows=4, max_query_tokens=most_tokens)
    portable_core, plain = (
        backend.prepare(asked)._mla._core for backend in (modes.portable(), modes.batch_invariant())
    )
    host = plain.chosen(HostPlan(num_rows=4, num_tokens=most_tokens))
    assert portable_core.variants == [plain.variants[host.choice]]


def test_a_request_map_is_what_the_plan_reads():
    """S-1: the table attention reads is built, not the one that was given."""
    runner = modes.request_map().prepare(problem())
    step = batch()
    runner.plan(step)
    assert runner._mla.block_table.tolist() == [[5, 2, -1, -1, -1, -1, -1, -1]]


def test_the_reserved_slot_is_never_written():
    """S-10: a token that an engine stores at slot 0 is stored nowhere."""
    runner, plain = (backend.prepare(problem()) for backend in (modes.reserved_slot(), create()))
    step = replace(batch(), slot_mapping=np.array([0, 9]))
    for each, touched in ((runner, False), (plain, True)):
        each.append(step)
        block = each.read_cache(np.array([0, 2]))
        assert block[0].any() == touched
        assert block[1].any()


def test_each_call_is_one_compiled_graph():
    """S-17: plan, append and attend are compiled once each for batches of one shape."""
    runner = modes.compiled().prepare(problem())
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    answers(runner, batch(1), batch(2))
    assert stats["unique_graphs"] - before == 3


def test_graphs_need_a_gpu():
    """S-17: without a GPU nothing can be captured, and the error states it."""
    with pytest.raises(Unsupported, match="CUDA device"):
        modes.graphed()


class Recorded(GraphedStep):
    """Replays by running the step again; recording touches the inputs as on a GPU."""

    def __init__(self, mlas, model_fn, inputs, buckets, *, caches=()):
        self._mlas, self._model_fn, self._caches = tuple(mlas), model_fn, tuple(caches)
        self.inputs = inputs
        self._ascending = sorted(set(buckets), key=lambda bucket: bucket.size)
        self.replays = []
        for bucket in reversed(self._ascending):
            inputs.clear()
            self.run_eagerly(inputs.view(bucket))
            inputs.poison()

    def replay(self, rows, tokens):
        self.replays.append(self.bucket(rows, tokens).tokens)
        return self.run_eagerly(self.inputs.view(self.bucket(rows, tokens)))


def test_a_graphed_runner_replays(monkeypatch):
    """S-17: each call is recorded once, in two buckets; the cache stays where it was."""
    monkeypatch.setattr(graphed, "GraphedStep", Recorded)
    backend = replace(create(), runner=graphed.GraphedRunner)
    small = problem(max_rows=1, max_query_tokens=2)
    runner = backend.prepare(small)
    address = runner._cache.latents.data_ptr()
    decode = replace(
        batch(3),
        cu_seqlens_q=np.array([0, 1], np.int32),
        **{name: getattr(batch(3), name)[:1] for name in ("q_nope", "q_pe", "ckv", "k_pe")},
    )
    given = replace(batch(4), slot_mapping=np.array([-1, 8]))
    steps = [batch(1), decode, given, batch(2)]
    recorded = []
    for step in steps:
        [found] = answers(runner, step)
        [expected] = answers(create().prepare(small), step)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.tobytes() == theirs.tobytes()
        recorded.append(dict(runner._steps))
    assert runner._cache.latents.data_ptr() == address
    assert all(recorded[-1][call] is step for call, step in recorded[0].items())
    replays = {call: step.replays for call, step in recorded[-1].items()}
    assert replays == {
        "append": [2, 1, 2],
        "append to slots": [2],
        "plan": [2, 1, 2, 2],
        "attend": [2, 1, 2, 2],
    }


def test_what_a_replay_does_not_write_shows(monkeypatch):
    """S-6: outputs of an earlier replay are overwritten before the next."""
    monkeypatch.setattr(graphed, "GraphedStep", Recorded)
    runner = replace(create(), runner=graphed.GraphedRunner).prepare(problem())
    answers(runner, batch(1))
    monkeypatch.setattr(Recorded, "replay", lambda *_: None)
    output = runner.attend(batch(2))
    assert isinstance(output, Output)
    assert np.isnan(output.out).all()
    assert np.isnan(output.lse).all()
