"""Events of layers. A CPU has no events to record: mock events record the calls."""

import pytest
import torch

from paged_mla_optimized import LayerEvents
from paged_mla_shared.errors import InvalidArgument, Unsupported


class Event:
    """Counts its calls."""

    def __init__(self, *, external):
        assert external
        self.calls = []

    def record(self):
        self.calls.append("record")

    def synchronize(self):
        self.calls.append("synchronize")


class Stream:
    """Notes what it waits for."""

    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_each_layer_has_an_event_of_its_own():
    events, stream = LayerEvents(3), Stream()
    events.record(1)
    events.synchronize(1)
    events.wait(1, stream)
    [waited] = stream.waited
    assert waited.calls == ["record", "synchronize"]
    for other in (0, 2):
        events.wait(other, stream)
        assert not stream.waited[-1].calls


@pytest.mark.parametrize("layer", [-1, 3, 1.0, None])
def test_a_layer_that_is_not_there(layer):
    """A negative one would be a layer from the end, whose cache is not written yet."""
    events, stream = LayerEvents(3), Stream()
    for call in (events.record, events.synchronize, lambda layer: events.wait(layer, stream)):
        with pytest.raises(InvalidArgument, match=r"^layer: got .*; allowed: "):
            call(layer)
    assert not stream.waited


@pytest.mark.parametrize("num_layers", [0, -1, 2.0])
def test_events_of_no_layer(num_layers):
    with pytest.raises(InvalidArgument, match="num_layers"):
        LayerEvents(num_layers)


def test_without_a_gpu_there_are_no_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unsupported, match="need a GPU"):
        LayerEvents(2)
