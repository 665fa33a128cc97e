"""Tests that inputs are poison until the stream has waited, with mocks of torch's streams."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from paged_mla_adapters.guards import Guards
from paged_mla_adapters.surroundings import calls
from paged_mla_adapters.surroundings import late_inputs as module


@pytest.fixture
def happened(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list of the operations on the device, in order."""
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: done.append("waited"))
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(module, "_stream_of", lambda _: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: done.append("slept"))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    return done


class Event:
    """An event that is complete as soon as it is recorded."""

    def __init__(self):
        self._recorded = False

    def record(self):
        """Record the event."""
        self._recorded = True

    def query(self):
        """Return whether the event is complete."""
        return self._recorded


GPU = SimpleNamespace(type="cuda")
GIVEN = {"q": torch.ones(2), "seq_lens": torch.ones(2, dtype=torch.int32)}


def copies() -> dict[str, torch.Tensor]:
    """Return the inputs of a call."""
    return {name: tensor.clone() for name, tensor in GIVEN.items()}


def test_inputs_are_written_after_the_stream_waited(
    happened: list[object], monkeypatch: pytest.MonkeyPatch
):
    """Before, a launch on another stream reads NaN and lengths of 0."""
    placed = copies()

    def sleep(_cycles: int) -> None:
        happened.append([bool(placed["q"].isnan().all()), placed["seq_lens"].tolist()])

    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    with module.late_inputs(placed, GIVEN, GPU):
        happened.append([placed["q"].tolist(), placed["seq_lens"].tolist()])
    assert happened == ["waited", [True, [0, 0]], [[1.0, 1.0], [1, 1]], "waited"]


def test_a_failed_call_waits_for_the_device(happened: list[object]):
    """The memory of the call is not reused before."""
    with pytest.raises(KeyError), module.late_inputs(copies(), GIVEN, GPU):
        raise KeyError
    assert happened[-1] == "waited"


def test_a_call_with_early_inputs_is_repeated(
    happened: list[object], monkeypatch: pytest.MonkeyPatch
):
    """A call is repeated once for each name, because its kernels are then compiled."""
    monkeypatch.setattr(calls, "fill_shared_memory", lambda _: happened.append("filled"))
    around = calls.Surroundings(torch.device("cpu"))
    monkeypatch.setattr(around, "_device", GPU)
    monkeypatch.setattr(calls, "guards_of", lambda _: Guards("cpu"))
    for _ in range(2):
        answer = around.run("attend", lambda placed, _room: placed["q"].sum(), GIVEN)
        assert answer == 2
    once = ["waited", "slept", "filled", "waited"]
    assert happened == 3 * once


def test_a_cpu_has_no_streams(happened: list[object]):
    """On a CPU the context does nothing."""
    with module.late_inputs(copies(), GIVEN, torch.device("cpu")) as have_come:
        assert not have_come()
    assert happened == []
