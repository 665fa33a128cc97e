"""Events for the completion of a layer's cache write, for transfers while the next layer runs."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.arguments import check_at_least, integer
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_shared.errors import InvalidArgument, Unsupported


class LayerEvents(Uncopied):
    """One CUDA event for each layer, recorded after its ``append`` in eager steps and in graphs.

    In a capture, the record becomes a node of the graph. Each replay records the event again, and
    a wait after the replay waits for that replay. A layer without a record counts as complete.

    Parameters
    ----------
    num_layers : int
        Number of layers, >= 1. Methods take a `layer` from 0 to ``num_layers - 1``.

    Raises
    ------
    InvalidArgument
        `num_layers` is not an integer or is below 1; in methods, `layer` is outside its range.
    Unsupported
        No GPU is available; events belong to the streams of a GPU.
    """

    def __init__(self, num_layers: int) -> None:
        check_at_least(1, num_layers=num_layers)
        if not torch.cuda.is_available():
            raise Unsupported("LayerEvents need a GPU, whose streams record them; there is none")
        # External events are visible outside the graph; others become edges inside the graph.
        self._events: list[torch.cuda.Event] = [
            torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]  # torch has no types
            for _ in range(num_layers)
        ]

    def record(self, layer: int) -> None:
        """Mark `layer` complete after all work that the current stream has now."""
        self._event(layer).record()

    def wait(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait until `layer` is complete; the call returns at once."""
        stream.wait_event(self._event(layer))

    def synchronize(self, layer: int) -> None:
        """Block the calling thread until `layer` is complete."""
        self._event(layer).synchronize()

    def _event(self, layer: int) -> torch.cuda.Event:
        if not 0 <= integer("layer", layer) < len(self._events):
            raise InvalidArgument("layer", layer, f"0 to {len(self._events) - 1}")
        return self._events[layer]
