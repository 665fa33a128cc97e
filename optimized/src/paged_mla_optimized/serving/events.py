"""Completion of one layer's cache write, for whoever ships the cache while the next layer runs."""

from __future__ import annotations

import torch

from paged_mla_optimized.config.arguments import check_at_least, integer
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_shared.errors import InvalidArgument, Unsupported


class LayerEvents(Uncopied):
    """One event for each layer; recorded after its ``append``, in eager steps and in graphs.

    Captured, the record is a node of the graph: each replay records it anew, and a wait that is
    issued after the replay waits for that replay.

    Parameters
    ----------
    num_layers : int
        >= 1. Methods take a `layer` from 0 to ``num_layers - 1``.

    Raises
    ------
    InvalidArgument
        No layers; in methods, a layer that is not there.
    Unsupported
        There is no GPU, whose streams events belong to.
    """

    def __init__(self, num_layers: int) -> None:
        check_at_least(1, num_layers=num_layers)
        if not torch.cuda.is_available():
            raise Unsupported("events of layers: there is no GPU, whose streams record them")
        # External: visible outside the graph that records it, where others become edges inside.
        self._events: list[torch.cuda.Event] = [
            torch.cuda.Event(external=True)  # type: ignore[no-untyped-call]  # torch has no types
            for _ in range(num_layers)
        ]

    def record(self, layer: int) -> None:
        """Mark `layer` complete once the current stream has done what it holds now."""
        self._event(layer).record()

    def wait(self, layer: int, stream: torch.cuda.Stream) -> None:
        """Let `stream` go on only once `layer` is complete; returns at once."""
        stream.wait_event(self._event(layer))

    def synchronize(self, layer: int) -> None:
        """Block the calling thread until `layer` is complete."""
        self._event(layer).synchronize()

    def _event(self, layer: int) -> torch.cuda.Event:
        if not 0 <= integer("layer", layer) < len(self._events):
            raise InvalidArgument("layer", layer, f"0 to {len(self._events) - 1}")
        return self._events[layer]
