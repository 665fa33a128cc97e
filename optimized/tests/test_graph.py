"""The state after a capture fails. A CPU cannot capture: mock graphs record the calls."""

import itertools
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from mla_step import P, R, build, config

from paged_mla_optimized import Bucket, GraphedStep, PagedMla, StaleGraph, StepInputs
from paged_mla_optimized.api import planned
from paged_mla_optimized.serving import graph
from paged_mla_optimized.tensors.step import MlaStep
from paged_mla_shared.errors import InvalidArgument, Unsupported

SMALL, LARGE = Bucket(4, 2), Bucket(16, 8)
CALLS_OF_A_CAPTURE = 3  # two to warm up, one recorded
TOKENS = {"q_nope": ((64, 4, R), torch.float32), "q_pe": ((64, 4, P), torch.float32)}


class Graph:
    """Replaces a graph; counts its replays, and stores its pool."""

    def __init__(self):
        self.replays = 0
        self.pool = None

    def replay(self):
        self.replays += 1


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """Take the place of streams and captures; yield the streams that are entered and not left."""
    entered = ["default"]
    recording = []

    @contextmanager
    def stream(new):
        before = entered.copy()
        entered.append(new)
        try:
            yield
        finally:
            entered[:] = before

    class Capture:
        """Does not leave its stream if what it recorded raised, as torch's does at times."""

        def __init__(self, graph, *, pool, stream):
            graph.pool = pool
            self.stream = stream

        def __enter__(self):
            entered.append(self.stream)
            recording.append(self)

        def __exit__(self, kind, *_):
            recording.remove(self)
            if kind is None:
                entered.pop()

    pools = itertools.count()
    made = SimpleNamespace(wait_stream=lambda _other: None)
    stand_ins = {
        "graph_pool_handle": lambda: next(pools),
        "Stream": lambda: made,
        "stream": stream,
        "current_stream": lambda: made,
        "synchronize": lambda: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (0, 0),
        "CUDAGraph": Graph,
        "graph": Capture,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(graph, "_check_device", lambda _: None)
    monkeypatch.setattr(planned, "is_capturing", lambda _: bool(recording))
    return entered


class Model:
    """Attends; raises at one of its calls."""

    def __init__(self, fails_at=None):
        self.mla = PagedMla(config(), "cpu")
        self.inputs = StepInputs(config(), "cpu", TOKENS)
        self.cache = torch.zeros(3, 16, R + P)
        self.calls, self.fails_at = 0, fails_at

    def __call__(self, view):
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("out of memory")
        return self.mla.attend(view.tokens["q_nope"], view.tokens["q_pe"], self.cache)

    def graphed(self, *buckets):
        return GraphedStep([self.mla], self, self.inputs, buckets, caches=[self.cache])


def assert_idle(inputs):
    for tensor in (inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_table):
        assert not tensor.any()


def test_without_a_gpu_the_error_names_the_alternative(monkeypatch):
    """S-20: a legal request that is not served there, by name and with the way out."""
    monkeypatch.undo()
    with pytest.raises(Unsupported, match=r"inputs are on cpu.*need a GPU.*without a graph"):
        Model().graphed(SMALL)


@pytest.mark.parametrize("call", [1, 3, 4, 6], ids=["warm-up", "capture", "second", "last"])
def test_inputs_are_idle_after_a_failed_capture(call, streams):
    """S-17: after any call fails, another step can use the inputs and other work the stream."""
    model = Model(fails_at=call)
    with pytest.raises(RuntimeError, match="out of memory"):
        model.graphed(SMALL, LARGE)
    assert_idle(model.inputs)
    assert streams == ["default"]
    model.graphed(SMALL, LARGE).replay(2, 4)


def test_graphs_share_a_pool_until_they_are_captured_again():
    """S-17: outputs of earlier replays can keep the old pool, into which torch cannot capture."""
    step = Model().graphed(SMALL, LARGE)

    def pools():
        return {captured.graph.pool for captured in step._graphs.values()}

    before = pools()
    step.recapture()
    assert len(before) == len(pools()) == 1
    assert before.isdisjoint(pools())


@pytest.mark.parametrize("call", [1, 3, 4, 6], ids=["warm-up", "capture", "second", "last"])
def test_a_failed_recapture_leaves_no_graph(call):
    """S-17: there are all graphs or none; without graphs, the error of a replay names the fix."""
    model = Model()
    step = model.graphed(SMALL)
    model.fails_at = CALLS_OF_A_CAPTURE + call
    with pytest.raises(RuntimeError, match="out of memory"):
        step.recapture([SMALL, LARGE])
    assert_idle(model.inputs)
    assert not step.graph_bytes
    with pytest.raises(StaleGraph, match="recapture"):
        step.replay(1, 1)
    step.recapture()
    step.replay(8, 16)
    assert set(step.graph_bytes) == {SMALL, LARGE}


REFUSED = {
    "none": {"buckets": []},
    "too-large": {"buckets": [SMALL, Bucket(65, 8)]},
    "pair": {"buckets": [SMALL, (8, 8)]},
    "no-cache": {"caches": [None]},
}


@pytest.mark.parametrize("given", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_captured_changes_nothing(given):
    """S-17: looked at before the graphs that are there are given up."""
    model = Model()
    step = model.graphed(SMALL)
    with pytest.raises(InvalidArgument):
        step.recapture(**given)
    assert model.calls == CALLS_OF_A_CAPTURE
    captured = step._graphs[SMALL]
    step.replay(2, 4)
    assert captured.graph.replays == 1


@pytest.mark.parametrize(
    ("argument", "step"), [("rows", (-1, 1)), ("tokens", (1, -1)), ("max_query_len", (1, 1, 0))]
)
def test_steps_that_cannot_be(argument, step):
    """S-17: they would fit every bucket."""
    graphed = Model().graphed(Bucket(4, 2, 4))
    with pytest.raises(InvalidArgument) as error:
        graphed.replay(*step)
    assert error.value.argument == argument


@pytest.mark.parametrize("argument", ["mlas", "inputs", "buckets", "caches"])
@pytest.mark.parametrize("given", ["one", "none", "others"])
def test_what_is_no_sequence_of_its_kind(argument, given):
    """S-17: an instance, a bucket or a cache alone is named; a tensor would be cut in blocks."""
    model = Model()
    right = {"mlas": [model.mla], "inputs": model.inputs, "buckets": [SMALL], "caches": []}
    one = {"mlas": model.mla, "inputs": [model.inputs], "buckets": SMALL, "caches": model.cache}
    wrong = {"one": one[argument], "none": None, "others": ["another"]}[given]
    with pytest.raises(InvalidArgument) as error:
        GraphedStep(model_fn=model, **(right | {argument: wrong}))
    assert error.value.argument == argument
    step = GraphedStep(model_fn=model, **right)
    if argument in {"buckets", "caches"} and wrong is not None:
        with pytest.raises(InvalidArgument):
            step.recapture(**{argument: wrong})
        step.replay(1, 1)  # the graphs are as they were


def test_a_replay_is_the_planned_step():
    """S-17: what is read of a step is of its bucket, behind other replays and eager steps too."""
    model = Model()
    step, eager = model.graphed(SMALL, LARGE), build((20, 3))
    for rows, tokens, bucket in ((8, 16, LARGE), (2, 4, SMALL), (1, 5, LARGE)):
        step.replay(rows, tokens)
        assert len(model.mla.slot_mapping) == len(model.mla.positions) == bucket.tokens
        assert len(model.mla.cu_seqlens_k) == bucket.rows + 1
        table, mine = step.inputs.view(bucket).block_table, model.mla.block_table
        assert (mine.data_ptr(), mine.shape) == (table.data_ptr(), table.shape)
        model.mla.plan(MlaStep(eager.cu_seqlens_q, eager.seq_lens, eager.block_table, num_tokens=3))
        assert model.mla.block_table is eager.block_table
    with pytest.raises(InvalidArgument, match="planned"):
        model.mla.resume(None)


def test_a_replay_returns_what_was_recorded():
    """S-17: of the smallest bucket that the step fits."""
    model = Model()
    step = model.graphed(SMALL, LARGE)
    assert [len(step.replay(*lens)[0]) for lens in ((1, 1), (2, 4), (3, 4), (8, 16))] == [
        4, 4, 16, 16,
    ]  # fmt: skip
    model.cache.set_(build((20, 1)).cache)
    with pytest.raises(StaleGraph, match="moved"):
        step.replay(1, 1)


def test_warming_up_over_a_live_cache_writes_nothing_to_named_slots():
    """S-6, S-10: neither when it is made nor when it is captured again, a step still loaded."""
    tokens = config().max_query_tokens
    cache = torch.full((3, 16, R + P), 7.0)
    mla = PagedMla(config(), "cpu")
    latents = {"ckv": ((tokens, R), torch.float32), "k_pe": ((tokens, P), torch.float32)}
    inputs = StepInputs(config(), "cpu", latents | {"slots": ((tokens,), torch.int64)})
    seen = []

    def model(view):
        if len(seen) % CALLS_OF_A_CAPTURE < CALLS_OF_A_CAPTURE - 1:  # the last one is recorded
            mla.append(view.tokens["ckv"], view.tokens["k_pe"], cache, view.tokens["slots"])
        seen.append(view.bucket)

    step = GraphedStep([mla], model, inputs, [SMALL, LARGE], caches=[cache])
    loaded = {"slots": torch.arange(4), "ckv": torch.ones(4, R), "k_pe": torch.ones(4, P)}
    inputs.load(MlaStep.from_host([4], [4], [[0]], device="cpu"), loaded)
    step.recapture()
    assert len(seen) == 4 * CALLS_OF_A_CAPTURE
    assert (cache == 7).all()
    assert (inputs.tokens["slots"] == -1).all()


def test_a_replay_checks_what_was_loaded(monkeypatch):
    """S-2, S-13: with `PAGED_MLA_CHECK=1`, also what an engine wrote into the inputs itself."""
    model, loaded = Model(), build((20, 3), (33, 1))
    monkeypatch.setenv("PAGED_MLA_CHECK", "1")
    step = model.graphed(SMALL, LARGE)
    table = loaded.block_table.remainder(9)[:, :3]
    lengths = (loaded.cu_seqlens_q, loaded.seq_lens, table)
    model.inputs.load(MlaStep(*lengths, num_tokens=4))
    refusals = [("rows", lambda: step.replay(1, 4)), ("block_table", lambda: step.replay(2, 4))]
    for argument, replay in refusals:  # the cache has three blocks
        with pytest.raises(InvalidArgument) as error:
            replay()
        assert error.value.argument == argument
    model.inputs.block_table[:2, :3] = torch.tensor([[0, 1, 0], [1, 2, 0]])
    model.inputs.seq_lens[1] = 20
    with pytest.raises(InvalidArgument, match="block 1 in rows 0 and 1"):
        step.replay(2, 4)
    model.inputs.seq_lens[:2] = torch.tensor([16, 32])
    model.inputs.cu_seqlens_q[:3] = torch.tensor([0, 3, 4])
    step.replay(2, 4)
