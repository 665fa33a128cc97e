"""A step that is captured in CUDA graphs, and replayed for every batch that fits (S-17)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from paged_mla_optimized.api.layer import MlaLayer
from paged_mla_optimized.api.paged_mla import PagedMla
from paged_mla_optimized.api.planned import PlannedStep
from paged_mla_optimized.config.arguments import check_kind, each_of
from paged_mla_optimized.config.attention import MlaConfig
from paged_mla_optimized.runtime.check_switch import CheckSwitch
from paged_mla_optimized.runtime.log import LOGGER
from paged_mla_optimized.runtime.uncopied import Uncopied
from paged_mla_optimized.serving.inputs import Bucket, StepInputs, StepView
from paged_mla_optimized.tensors.latent_cache import Cache, LatentCache, is_of_format, tensors_of
from paged_mla_shared.errors import InvalidArgument, Unsupported

_WARM_UPS = 2


class StaleGraph(RuntimeError):
    """No step is captured, or a cache that the graph uses has moved: capture again."""


class GraphedStep(Uncopied):
    """Planning and model in CUDA graphs, one graph for each bucket, in one memory pool.

    Buckets are captured from the largest to the smallest, so that smaller graphs reuse the memory
    of the largest. All graphs share the inputs and the workspace of `mlas`: replays on one stream
    may have any order. If a capture raises an error, the inputs are idle afterwards.

    Parameters
    ----------
    mlas : sequence of PagedMla or MlaLayer
        Instances that plan the step's inputs before `model_fn` runs, so that layers only append and
        attend. Empty if `model_fn` plans by itself, as for multi-step drafts.
    model_fn : callable of StepView
        Runs the layers; :meth:`replay` returns its result. It first runs eagerly on idle inputs,
        for which it appends nothing to a cache, also with slots from `inputs`. It must neither
        wait for the device nor read values.
    inputs : StepInputs
    buckets : sequence of Bucket
    caches : sequence of Tensor or LatentCache
        Caches that `model_fn` uses. If one of them moves, a replay raises ``StaleGraph``.

    Raises
    ------
    InvalidArgument, Unsupported
        The errors of :meth:`recapture`.
    """

    def __init__(
        self,
        mlas: Sequence[PagedMla | MlaLayer],
        model_fn: Callable[[StepView], Any],
        inputs: StepInputs,
        buckets: Sequence[Bucket],
        *,
        caches: Sequence[Cache] = (),
    ) -> None:
        self._mlas = each_of("mlas", mlas, PagedMla, MlaLayer)
        check_kind("inputs", inputs, StepInputs)
        self._model_fn = model_fn
        self.inputs = inputs
        self._caches = each_of("caches", caches, torch.Tensor, LatentCache)
        self._switch = CheckSwitch(inputs.seq_lens.device)
        self.graph_bytes: dict[Bucket, int] = {}
        """Device memory in bytes that the capture of each bucket took."""
        self._ascending: list[Bucket] = []
        self._graphs: dict[Bucket, _Captured] = {}
        self.recapture(buckets)

    def recapture(
        self, buckets: Sequence[Bucket] | None = None, caches: Sequence[Cache] | None = None
    ) -> None:
        """Capture again, for other buckets or after the caches moved.

        The existing graphs are freed first. If `model_fn` raises an error, no graph exists until a
        capture succeeds, and replays raise ``StaleGraph``.

        Raises
        ------
        InvalidArgument
            `buckets` is empty, has an entry that is not a bucket or does not fit the inputs, or a
            cache is not a cache. The graphs are unchanged then.
        Unsupported
            The inputs are not on a GPU, which CUDA graphs need.
        """
        if buckets is not None:
            buckets = each_of("buckets", buckets, Bucket)
        if caches is not None:
            caches = each_of("caches", caches, torch.Tensor, LatentCache)
        _check_device(self.inputs.seq_lens.device)
        buckets = self._ascending if buckets is None else sorted(set(buckets), key=_size)
        if not buckets:
            raise InvalidArgument("buckets", "none", "at least one")
        views = [self.inputs.view(bucket) for bucket in reversed(buckets)]
        caches = self._caches if caches is None else caches
        addresses = _addresses_of(caches)
        self._ascending, self._caches, self._addresses = buckets, caches, addresses
        self._forget()
        # A new pool: torch cannot capture into one that only outputs of earlier replays use.
        self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(self.inputs.seq_lens.get_device()):
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch has no types
            try:
                for view in views:
                    self._graphs[view.bucket] = self._capture(view)
            except BaseException:
                self._forget()
                raise
            finally:
                self.inputs.clear()
                torch.cuda.synchronize()  # the next step may be loaded on another stream

    def _forget(self) -> None:
        self._graphs.clear()
        self.graph_bytes.clear()

    def bucket(self, rows: int, tokens: int, max_query_len: int | None = None) -> Bucket:
        """Return the smallest bucket that fits a step.

        The parameters are those of :meth:`replay`.

        Raises
        ------
        InvalidArgument
            No bucket fits, or a parameter is outside its range.
        """
        needed = Bucket(tokens, rows, max_query_len)
        for bucket in self._ascending:
            if all(room >= need for room, need in zip(bucket.size, needed.size, strict=True)):
                return bucket
        allowed = ", ".join(map(str, self._ascending))
        raise InvalidArgument("step", needed, f"{allowed}; recapture(buckets=...) for a larger one")

    def replay(self, rows: int, tokens: int, max_query_len: int | None = None) -> Any:
        """Run the step in :attr:`inputs`; return the result of `model_fn` at the capture.

        Afterwards this step is the latest planned step of `mlas`, with the sizes of its bucket.

        Parameters
        ----------
        rows, tokens : int
            Upper bounds that choose the bucket. The lengths themselves are read on the device.
        max_query_len : int or None
            The longest query of any row. ``None`` means that the host does not know it; only
            buckets without a `max_query_len` fit then.

        Raises
        ------
        InvalidArgument
            No bucket is large enough, `rows` or `tokens` is negative, or `max_query_len` is below
            1.
        StaleGraph
            A cache moved since the capture, or the last capture failed.

        Notes
        -----
        With ``PAGED_MLA_CHECK=1`` a replay waits for the device and checks the inputs, and the
        scales of `caches` that each of `mlas` reads, against the rules.
        """
        if not self._graphs:
            raise StaleGraph("there is no graph, since capturing failed; call recapture()")
        if _addresses_of(self._caches) != self._addresses:
            raise StaleGraph("a cache moved since the capture; call recapture(caches=...)")
        bucket = self.bucket(rows, tokens, max_query_len)
        if self._switch.is_on:
            self._check(self.inputs.view(bucket), rows)
        captured = self._graphs[bucket]
        captured.graph.replay()
        for mla, planned in zip(self._mlas, captured.planned, strict=True):
            mla.resume(planned)
        return captured.outputs

    def run_eagerly(self, view: StepView) -> Any:
        """Run the step without a graph, with the same kernel launches."""
        for mla in self._mlas:
            mla.plan(view.step)
        return self._model_fn(view)

    def _check(self, view: StepView, rows: int) -> None:
        """Check the inputs, and the caches of the formats of `mlas`, against the rules."""
        if rows < self.inputs.loaded_rows:
            allowed = f"at least {self.inputs.loaded_rows}, the rows that load() copied"
            raise InvalidArgument("rows", rows, allowed)
        for mla in self._mlas:
            caches: list[Cache | None] = [
                cache for cache in self._caches if is_of_format(_config_of(mla), cache)
            ]
            for cache in caches or [None]:
                slots = view.tokens.get("slot_mapping")
                mla.check(view.step, slot_mapping=slots, cache=cache)

    def _capture(self, view: StepView) -> _Captured:
        began = time.perf_counter()
        self.inputs.clear()
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # restores the stream even if the end of a capture raises
            for _ in range(_WARM_UPS):  # compiles kernels and fills library workspaces
                self.run_eagerly(view)
            self.inputs.poison()  # the captured work must not depend on values at the capture
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # memory of the warm-up would distort the measured size
            free = torch.cuda.mem_get_info()[0]
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                outputs = self.run_eagerly(view)
        torch.cuda.synchronize()
        taken = free - torch.cuda.mem_get_info()[0]
        self.graph_bytes[view.bucket] = taken
        seconds = time.perf_counter() - began
        LOGGER.info("captured %s: %s bytes, %.2f s", view.bucket, f"{taken:,}", seconds)
        return _Captured(graph, outputs, [mla.planned for mla in self._mlas])


class _Captured(NamedTuple):
    """A graph, its result, and the step that it plans for each instance."""

    graph: torch.cuda.CUDAGraph
    outputs: Any
    planned: list[PlannedStep]


def _check_device(device: torch.device) -> None:
    if device.type != "cuda":
        raise Unsupported(
            f"GraphedStep: the inputs are on {device}, and CUDA graphs need a GPU; "
            "run plan, append and attend without a graph there"
        )


def _config_of(mla: PagedMla | MlaLayer) -> MlaConfig:
    return mla.config.attention if isinstance(mla, MlaLayer) else mla.config


def _addresses_of(caches: Sequence[Cache]) -> list[int]:
    return [tensor.data_ptr() for cache in caches for tensor in tensors_of(cache)]


def _size(bucket: Bucket) -> tuple[int, int, float]:
    return bucket.size
