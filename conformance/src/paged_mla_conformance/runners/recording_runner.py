"""A runner that forwards every call and keeps a dump of the last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from paged_mla_reference.forwarding_runner import ForwardingRunner
from paged_mla_reference.rules.cache import slots_to_write
from paged_mla_shared.backend import OPERATIONS, Backend, Runner
from paged_mla_shared.dtypes import numpy_dtype
from paged_mla_shared.dump import Dump
from paged_mla_shared.layer import LayerBatch
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.operation import Operation
from paged_mla_shared.prefill import PrefillBatch
from paged_mla_shared.problem import Batch, Metadata, Output, Problem
from paged_mla_shared.strides import copied

T = TypeVar("T")
MOST_BLOCKS = 4096  # larger caches are not recorded whole


class RecordingRunner(ForwardingRunner):
    """Forwards every call and records the inputs and results of the last step.

    Parameters
    ----------
    problem : Problem
    inner : Runner
        The runner that receives the calls.
    asked : callable
        Takes this runner; it is called before each operation.

    Attributes
    ----------
    arrays : dict of str to array
        The arrays of the dump.
    calls : list of (str, tuple)
        The names and arguments of all calls that load a cache or take a step or a prefill.
    """

    def __init__(
        self, problem: Problem, inner: Runner, asked: Callable[[RecordingRunner], None]
    ) -> None:
        super().__init__(problem, inner)
        self._asked = asked
        self.arrays: dict[str, NDArray[Any]] = {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._batch: Batch | None = None
        self._loaded: CacheImage | None = None  # until something is written
        self._poison = np.zeros(1, np.uint8)
        self._listed = np.zeros(0, np.int64)

    @property
    def dump(self) -> Dump:
        """The last step as a dump."""
        return Dump(problem=self.problem, arrays=self.arrays)

    def load_cache(self, image: CacheImage) -> None:
        """Forward the image and start a new step."""
        self.calls.append(("load_cache", (image,)))
        self._loaded = image
        self.inner.load_cache(image)
        self.arrays, self._batch = {}, None
        self._poison, self._listed = image.poison, image.block_ids

    def plan(self, batch: Batch) -> Metadata:
        """Record positions and slots."""
        self._begin("plan", batch)
        found = self.inner.plan(batch)
        self.arrays |= {"positions": found.positions, "slots": found.slot_mapping}
        return found

    def append(self, batch: Batch) -> None:
        """Record the cache before and after the append, and the step's latents after it."""
        self._begin("append", batch)
        self._appending(batch, lambda: self.inner.append(batch))
        self.arrays |= {"ckv_left": batch.ckv.copy(), "k_pe_left": batch.k_pe.copy()}

    def attend(self, batch: Batch) -> Output:
        """Record the output and the cache after the call.

        If the step was not appended, the cache before the call is recorded too.
        """
        self._begin("attend", batch)
        blocks = self._blocks(batch)
        if not {"cache_before", "bytes_before"} & set(self.arrays):  # nothing was appended
            for name in ("ckv", "k_pe", "slot_mapping"):
                self.arrays.pop(name, None)
            self._keep_cache("before", blocks, self._given(blocks))
        answer = self.inner.attend(batch)
        self._keep_cache("after", blocks, self.inner.read_cache(blocks))
        self.arrays |= {"out": answer.out.copy(), "lse": answer.lse.copy()}
        return answer

    def gather_context(self, batch: Batch) -> tuple[NDArray[Any], NDArray[Any]]:
        """Record the cache, and the gathered latents and keys."""
        self._begin("gather_context", batch)
        blocks = self._blocks(batch)
        self._keep_cache("after", blocks, self._given(blocks))
        ckv, k_pe = self.inner.gather_context(batch)
        self.arrays |= {"gathered_ckv": ckv.copy(), "gathered_k_pe": k_pe.copy()}
        return ckv, k_pe

    def quantize_queries(
        self, batch: Batch, scale: float | None
    ) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
        """Record codes and scales."""
        self._begin("quantize_queries", batch, scale)
        codes, scales = self.inner.quantize_queries(batch, scale)
        self.arrays |= {"query_codes": codes.copy(), "query_scales": scales.copy()}
        if scale is not None:
            self.arrays["query_scale"] = np.array(scale, np.float32)
        return codes, scales

    def prefill(self, batch: PrefillBatch) -> Output:
        """Record the prefill and its output; a prefill is not a step and has no other arrays."""
        self._asked(self)
        self.calls.append(("prefill", (batch,)))
        given = {name: copied(np.asarray(array)) for name, array in vars(batch).items()}
        answer = self.inner.prefill(batch)
        given |= {"out": answer.out.copy(), "lse": answer.lse.copy()}
        self._batch, self.arrays = None, {f"prefill_{name}": x for name, x in given.items()}
        return answer

    def layer(self, batch: LayerBatch) -> Output:
        """Record the step, the cache before and after, the weights, and the output."""
        self._asked(self)
        self.calls.append(("layer", (batch,)))
        self._keep_step(batch.step)
        step = self.arrays
        if "q_nope" in step:  # a second call for the same step lacks it
            step["layer_q_nope"] = step.pop("q_nope")
        step["kv_b_proj"] = batch.kv_b_proj
        step["absorbed_rows"] = np.array(batch.absorbed_rows, np.int32)
        step["workspace"] = np.array(batch.workspace, np.int64)
        answer = self._appending(batch.step, lambda: self.inner.layer(batch))
        self.arrays |= {"layer_out": answer.out.copy(), "layer_lse": answer.lse.copy()}
        return answer

    def merge(self, partials: Sequence[Output]) -> Output:
        """Record the partial results and the merged output."""
        self._asked(self)
        parts = {
            "partial_out": np.stack([part.out for part in partials]),
            "partial_lse": np.stack([part.lse for part in partials]),
        }
        merged = self.inner.merge(partials)
        self._batch, self.arrays = (
            None,
            parts | {"out": merged.out.copy(), "lse": merged.lse.copy()},
        )
        return merged

    def ask(self, operation: Operation, batch: Batch, *others: Any) -> Any:
        """Record the step and the cache of an operation whose result a dump cannot contain."""
        self._begin(operation.name, batch, *others)
        blocks = self._blocks(batch)
        self._keep_cache("after", blocks, self._given(blocks))
        return getattr(self.inner, operation.name)(batch, *others)

    def _begin(self, call: str, batch: Batch, *others: Any) -> None:
        """Record the arguments of a call; another batch starts another step."""
        self._asked(self)
        self.calls.append((call, (batch, *others)))
        self._keep_step(batch)

    def _keep_step(self, batch: Batch) -> None:
        if batch is not self._batch:
            arrays = {name: a for name, a in vars(batch).items() if isinstance(a, np.ndarray)}
            self._batch, self.arrays = batch, {name: copied(a) for name, a in arrays.items()}

    def _appending(self, batch: Batch, call: Callable[[], T]) -> T:
        """Record the cache before and after a call that writes the tokens of the step."""
        blocks = self._blocks(batch)
        before = self._given(blocks)
        self._loaded = None
        found = call()
        self._listed = np.union1d(self._listed, blocks)
        self._keep_cache("before", blocks, before)
        self._keep_cache("after", blocks, self.inner.read_cache(blocks))
        return found

    def _given(self, blocks: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return blocks of the loaded image, or of the runner's cache if it was written since."""
        if self._loaded is not None:
            return self._loaded.read(blocks)
        return self.inner.read_cache(blocks).copy()

    def _blocks(self, batch: Batch) -> NDArray[np.int64]:
        """Return the ids of all blocks of a small cache, else of the loaded and written blocks."""
        layout = self.problem.layout
        if layout.num_blocks <= MOST_BLOCKS:
            return np.arange(layout.num_blocks, dtype=np.int64)
        slots = slots_to_write(self.problem, batch)
        return np.union1d(self._listed, slots[slots >= 0] // layout.block_size)

    def _keep_cache(self, when: str, blocks: NDArray[np.int64], raw: NDArray[np.uint8]) -> None:
        layout = self.problem.layout
        self.arrays |= {"block_ids": blocks, "unlisted": self._poison}
        if layout.token_padding or layout.block_padding:
            self.arrays[f"bytes_{when}"] = raw.copy()
            return
        dtype, count = layout.format.row(layout.dims)
        rows = np.ascontiguousarray(layout.rows(raw)).view(numpy_dtype_of(dtype))
        self.arrays[f"cache_{when}"] = rows.reshape(len(raw), layout.block_size, count).copy()
        if layout.format.scales_per_block(layout.block_size):
            self.arrays[f"scales_{when}"] = layout.scales(raw).copy()


def numpy_dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of rows, from the element type that ``CacheFormat.row`` names."""
    return np.dtype(np.uint8) if name == "uint8" else numpy_dtype(name)


def _asked(operation: Operation) -> Callable[..., Any]:
    """Return a method that calls :meth:`RecordingRunner.ask` for an operation."""
    return lambda runner, *given: runner.ask(operation, *given)


for _name, _operation in OPERATIONS.items():
    if _name not in vars(RecordingRunner):
        setattr(RecordingRunner, _name, _asked(_operation))


@dataclass
class RecordingBackend:
    """A backend whose runners record their calls.

    Parameters
    ----------
    inner : Backend
    last : RecordingRunner or None
        The runner that was called last.
    """

    inner: Backend
    last: RecordingRunner | None = None

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the inner backend."""
        return getattr(self.inner, name)

    def prepare(self, problem: Problem) -> Runner:
        """Return a runner that records its calls."""
        return RecordingRunner(problem, self.inner.prepare(problem), self._asked)

    def _asked(self, runner: RecordingRunner) -> None:
        self.last = runner
