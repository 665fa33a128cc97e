"""Dumps of running steps, for ``paged-mla explain``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.prefill import Prefill
from paged_mla_optimized.config.arguments import check_kind
from paged_mla_optimized.inspect.record_prefill import PrefillRecorder
from paged_mla_optimized.inspect.record_step import LayerRecorder, StepRecorder
from paged_mla_optimized.inspect.samples import Samples


@contextmanager
def record(
    instance: PagedMla | MlaLayer | Prefill,
    folder: Path | str,
    *,
    every: int = 1,
    layers: Sequence[int] | None = None,
    most_bytes: int = 1 << 30,
) -> Iterator[Samples]:
    """Write dumps of what an instance is given and answers, while open.

    Layers are counted by their ``attend`` since the step's ``plan``. A sampled layer waits for the
    device and copies every block that its rows use, before and after; others cost nothing. What is
    captured in a graph, or compiled, is not seen. Recorders of one instance close in the order
    against that in which they were opened.

    Parameters
    ----------
    instance : PagedMla, MlaLayer or Prefill
    folder : Path or str
        Made if it is not there. Files of the same names are overwritten: recorders that are open
        beside each other need a folder each.
    every : int
        One step of so many is sampled, >= 1.
    layers : sequence of int or None
        Layers of a sampled step; ``None`` takes all.
    most_bytes : int
        All dumps together, roughly; what does not fit is counted in ``skipped``.

    Yields
    ------
    Samples
        Of files ``step-layer.safetensors``.

    Raises
    ------
    InvalidArgument
        `instance` is of another class; `every` is no integer or below 1, or `layers` or
        `most_bytes` none or below 0.
    Unsupported
        A :class:`Prefill` does not write answers of rows without keys.
    """
    check_kind("instance", instance, PagedMla, MlaLayer, Prefill)
    samples = Samples(folder, every, layers, most_bytes)
    recorder = _recorder_of(instance, samples)
    names = [name for name in ("plan", "append", "attend") if hasattr(recorder, name)]
    outer = {name: vars(instance)[name] for name in names if name in vars(instance)}
    vars(instance).update({name: getattr(recorder, name) for name in names})
    try:
        yield samples
    finally:
        for name in names:
            del vars(instance)[name]
        vars(instance).update(outer)


def _recorder_of(
    instance: PagedMla | MlaLayer | Prefill, samples: Samples
) -> StepRecorder | PrefillRecorder:
    if isinstance(instance, Prefill):
        return PrefillRecorder(instance, samples)
    if isinstance(instance, MlaLayer):
        return LayerRecorder(instance, instance.config.attention, samples)
    return StepRecorder(instance, instance.config, samples)
