"""Record dumps of running steps, for ``paged-mla explain``."""

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
    """Write dumps of an instance's inputs and outputs inside a with statement.

    Layers are counted by the calls of ``attend`` since the step's ``plan``. For a sampled layer,
    the host waits for the device and copies every block of its rows, before and after; other layers
    cost nothing. Calls in graph captures and in compiled functions are not recorded. Close the
    recorders of one instance in the reverse order of their opening.

    Parameters
    ----------
    instance : PagedMla, MlaLayer or Prefill
    folder : Path or str
        The folder, which is created if it does not exist. Files of the same names are overwritten,
        so recorders that are open at the same time need separate folders.
    every : int
        One of this many steps is sampled, >= 1.
    layers : sequence of int or None
        Layers of a sampled step; ``None`` records all layers.
    most_bytes : int
        Approximate limit for all dumps together; dumps that do not fit are counted in ``skipped``.

    Yields
    ------
    Samples
        The written dumps, files ``step-layer.safetensors``.

    Raises
    ------
    InvalidArgument
        `instance` has another class, `every` is not an integer or is below 1, or `layers` or
        `most_bytes` is not valid.
    Unsupported
        A :class:`Prefill` does not write outputs of rows without keys.
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
