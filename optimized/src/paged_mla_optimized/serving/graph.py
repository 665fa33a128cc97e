"""A step recorded once in CUDA graphs, and replayed for every batch that fits (S-17)."""

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
    """There is no captured step, or a tensor it reads is no longer where it was: capture again."""


class GraphedStep(Uncopied):
    """Plan and model in CUDA graphs, one for each bucket, in one memory pool.

    Buckets are captured largest first, so that the smaller ones live in the memory of the
    largest. All of them share the inputs and the workspace of `mlas`: replays on one stream may
    follow each other in any order. Where capturing raises, the inputs are idle afterwards.

    Parameters
    ----------
    mlas : sequence of PagedMla or MlaLayer
        Planned from the step's inputs before `model_fn` runs, so that layers only append and
        attend. Empty if `model_fn` plans itself, as drafts of several steps do.
    model_fn : callable of StepView
        The layers. Runs eagerly on idle inputs first, which append nothing to a cache, also where
        it appends to named slots of `inputs`; must neither wait for the device nor read values.
        What it returns, :meth:`replay` returns.
    inputs : StepInputs
    buckets : sequence of Bucket
    caches : sequence of Tensor or LatentCache
        Caches that `model_fn` uses. A replay after one of them moved raises ``StaleGraph``.

    Raises
    ------
    InvalidArgument, Unsupported
        As :meth:`recapture` does.
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
        """Device memory that capturing each bucket took."""
        self._ascending: list[Bucket] = []
        self._graphs: dict[Bucket, _Captured] = {}
        self.recapture(buckets)

    def recapture(
        self, buckets: Sequence[Bucket] | None = None, caches: Sequence[Cache] | None = None
    ) -> None:
        """Capture again: for other buckets, or after the caches moved.

        The graphs that were there make room first. Where `model_fn` raises, there are none until
        capturing succeeds: replays raise ``StaleGraph``.

        Raises
        ------
        InvalidArgument
            No bucket, one that is none or that the inputs have no room for, or a cache that is
            none; the graphs are as they were.
        Unsupported
            The inputs are on no GPU, and only a GPU has CUDA graphs.
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
        # Another pool: torch may not capture into one that only answers of earlier replays hold.
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
                torch.cuda.synchronize()  # the next step may be loaded on any stream

    def _forget(self) -> None:
        self._graphs.clear()
        self.graph_bytes.clear()

    def bucket(self, rows: int, tokens: int, max_query_len: int | None = None) -> Bucket:
        """Return the smallest bucket that a step fits; parameters are those of :meth:`replay`."""
        needed = Bucket(tokens, rows, max_query_len)
        for bucket in self._ascending:
            if all(room >= need for room, need in zip(bucket.size, needed.size, strict=True)):
                return bucket
        allowed = ", ".join(map(str, self._ascending))
        raise InvalidArgument("step", needed, f"{allowed}; recapture(buckets=...) for a larger one")

    def replay(self, rows: int, tokens: int, max_query_len: int | None = None) -> Any:
        """Run the step that lies in :attr:`inputs`; return what `model_fn` returned at capture.

        It is the planned step of `mlas` afterwards, in the sizes of its bucket.

        Parameters
        ----------
        rows, tokens : int
            Upper bounds that choose the bucket. Lengths are read on the device.
        max_query_len : int or None
            Longest query of any row; ``None`` where the host does not know, and takes only
            buckets without such a bound.

        Raises
        ------
        InvalidArgument
            No bucket is large enough, or what no step has: fewer than no rows or tokens, a longest
            query below 1.
        StaleGraph
            A cache moved since the capture, or capturing failed.

        Notes
        -----
        ``PAGED_MLA_CHECK=1`` has it wait for the device, and hold the inputs and the scales of
        `caches` against the rules, as each of `mlas` reads them.
        """
        if not self._graphs:
            raise StaleGraph("no graph since capturing failed: call recapture()")
        if _addresses_of(self._caches) != self._addresses:
            raise StaleGraph("a cache moved since the capture: call recapture(caches=...)")
        bucket = self.bucket(rows, tokens, max_query_len)
        if self._switch.is_on:
            self._check(self.inputs.view(bucket), rows)
        captured = self._graphs[bucket]
        captured.graph.replay()
        for mla, planned in zip(self._mlas, captured.planned, strict=True):
            mla.resume(planned)
        return captured.outputs

    def run_eagerly(self, view: StepView) -> Any:
        """Run the step without a graph; the same launches."""
        for mla in self._mlas:
            mla.plan(view.step)
        return self._model_fn(view)

    def _check(self, view: StepView, rows: int) -> None:
        """Hold the inputs, and caches of the format of `mlas`, against the rules."""
        if rows < self.inputs.loaded_rows:
            allowed = f"at least {self.inputs.loaded_rows}, which load() copied"
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
        with torch.cuda.stream(stream):  # left even where the end of a broken capture raises
            for _ in range(_WARM_UPS):  # compiles kernels and fills library workspaces
                self.run_eagerly(view)
            self.inputs.poison()  # nothing that is recorded may depend on what is there now
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # what the warm-up left would count as memory given back
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
    """A graph, what it returns, and the step that it plans for each instance."""

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
