"""A runner that calls a kernel for the suite, in surroundings that show a kernel's faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_adapters.arrays import DTYPES, to_numpy, to_torch
from paged_mla_adapters.call import AppendCall, Call, MergeCall
from paged_mla_adapters.surroundings.calls import surroundings
from paged_mla_adapters.surroundings.room import Room
from paged_mla_reference.rules.fp8 import quantize
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

Answers = tuple[torch.Tensor, torch.Tensor]  # out [T, H, R], lse [T, H]
Given = Mapping[str, torch.Tensor]


class Kernels(Protocol):
    """The kernels that a runner calls: see :class:`paged_mla_adapters.kernel.KernelBackend`."""

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the kernels."""

    @property
    def kernel(self) -> Callable[[Call], Answers]:
        """The attention kernel."""

    @property
    def append(self) -> Callable[[AppendCall], None] | None:
        """The function that writes to the cache, if there is one."""

    @property
    def merge(self) -> Callable[[MergeCall], Answers] | None:
        """The merge, if there is one."""


class KernelRunner:
    """A :class:`paged_mla_shared.backend.Runner` that calls kernels.

    Parameters
    ----------
    problem : Problem
    kernels : Kernels
    device : str
        The torch device of all tensors.
    """

    def __init__(self, problem: Problem, kernels: Kernels, device: str) -> None:
        self._problem = problem
        self._kernels = kernels
        self._device = device
        self._surroundings = surroundings(device)
        self._storage = torch.zeros(0, dtype=torch.uint8, device=device)

    def load_cache(self, image: CacheImage) -> None:
        """Fill the cache with the image's poison, then write the image's blocks."""
        layout = image.layout
        self._storage = torch.empty(0, dtype=torch.uint8, device=self._device)  # frees the old one
        storage = self._surroundings.cache(layout.storage_bytes)
        storage.view(-1, len(image.poison)).copy_(self._tensor(image.poison))
        blocks = storage.view(layout.num_blocks, -1)
        blocks[self._tensor(image.block_ids)] = self._tensor(image.blocks)
        self._storage = storage

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return the bytes of blocks, uint8 [n, block_stride]."""
        blocks = self._storage.view(self._problem.layout.num_blocks, -1)
        return to_numpy(blocks[self._tensor(block_ids)])

    def plan(self, batch: Batch) -> Metadata:
        """Return the reference's positions and slots."""
        return metadata(self._problem, batch)

    def append(self, batch: Batch) -> None:
        """Write the tokens of a batch to the cache, with the kernels' writer if there is one.

        The slots are those of the batch, or those that the reference plans.
        """
        slots = batch.slot_mapping
        slots = self.plan(batch).slot_mapping if slots is None else slots
        if self._kernels.append is None or len(slots) == 0:
            self._append_right(batch, slots)
            return
        write = self._kernels.append

        def launch(given: Given, room: Room) -> None:
            call = AppendCall(room=room, problem=self._problem, cache=self._numbers(), **given)
            write(call)
            call.finish()

        arrays = {"ckv": batch.ckv, "k_pe": batch.k_pe, "slot_mapping": slots}
        inputs = {name: self._tensor(array) for name, array in arrays.items()}
        self._surroundings.run("append", launch, inputs)

    def _append_right(self, batch: Batch, slots: NDArray[np.int64]) -> None:
        layout, written = self._problem.layout, slots >= 0
        rows = np.hstack([batch.ckv[written], batch.k_pe[written]])
        if self._is_fp8:
            rows = quantize(
                rows.astype(np.float32), np.array(self._problem.cache_scale, np.float32)
            )

        def launch(given: Given, _room: Room) -> None:
            at = given["slots"]
            self._cache()[at // layout.block_size, at % layout.block_size] = given["rows"]

        inputs = {"slots": self._tensor(slots[written]), "rows": self._tensor(rows)}
        self._surroundings.run("append", launch, inputs, by_torch=True)

    def attend(self, batch: Batch) -> Output:
        """Call the kernel on the rows of the batch, followed by rows for padded tokens.

        Rows without query tokens are left out unless the capabilities have the feature "mixed". A
        batch without tokens makes no call.

        Raises
        ------
        Unsupported
            Rows have different query lengths, and the capabilities lack the feature "mixed".
        """
        dims, tokens = self._problem.dims, batch.num_tokens
        if tokens == 0:
            shape = (0, dims.num_heads, dims.kv_lora_rank)
            return Output(np.zeros(shape, batch.q_nope.dtype), np.zeros(shape[:2], np.float32))
        rows, padded_len = self._rows(batch)
        lens = batch.query_lens[rows]
        padded = -(-(tokens - int(lens.sum())) // padded_len)
        lens = np.pad(lens, (0, padded), constant_values=padded_len)
        q = np.concatenate([batch.q_nope, batch.q_pe], axis=-1)
        q = np.concatenate([q, np.zeros((int(lens.sum()) - tokens, *q.shape[1:]), q.dtype)])

        def launch(given: Given, room: Room) -> Answers:
            call = Call(room=room, problem=self._problem, cache=self._numbers(), **given)
            with np.errstate(all="ignore"):  # the interpreter warns about lanes that kernels mask
                answers = self._kernels.kernel(call)
            call.finish()
            return answers

        inputs = {
            "q": self._tensor(q),
            "cu_seqlens_q": self._tensor(np.pad(lens.cumsum(), (1, 0)).astype(np.int32)),
            "block_table": self._tensor(np.pad(batch.block_table[rows], ((0, padded), (0, 0)))),
            "seq_lens": self._tensor(np.pad(batch.seq_lens[rows], (0, padded))),
        }
        out, lse = self._surroundings.run("attend", launch, inputs)
        return Output(to_numpy(out[:tokens]), to_numpy(lse[:tokens]))

    def merge(self, partials: Sequence[Output]) -> Output:
        """Merge partial results in order: each merge adds one partial result."""
        assert self._kernels.merge is not None
        merge = self._kernels.merge

        def launch(given: Given, room: Room) -> Answers:
            return merge(MergeCall(room=room, **given))

        pairs = [(self._tensor(part.out), self._tensor(part.lse)) for part in partials]
        if len(pairs) == 1:
            pairs.append((torch.zeros_like(pairs[0][0]), torch.full_like(pairs[0][1], -torch.inf)))
        merged = pairs[0]
        for pair in pairs[1:]:
            inputs = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), (*merged, *pair), strict=True))
            merged = self._surroundings.run("merge", launch, inputs)
        return Output(to_numpy(merged[0]), to_numpy(merged[1]))

    def _rows(self, batch: Batch) -> tuple[NDArray[np.bool_], int]:
        """Return a mask of the rows to pass, and the query length of a row of padded tokens."""
        if "mixed" in self._kernels.capabilities.features:
            return np.ones(batch.num_rows, bool), 1
        asking = batch.query_lens > 0
        lengths = set(batch.query_lens[asking].tolist()) or {1}
        if len(lengths) > 1:
            raise Unsupported(
                f"rows of different query lengths are not supported: {sorted(lengths)}"
            )
        return asking, lengths.pop()

    @property
    def _is_fp8(self) -> bool:
        return self._problem.cache_format == "fp8_e4m3"

    def _cache(self) -> torch.Tensor:
        """Return a view [num_blocks, block_size, R + P] of the cache; of e4m3, uint8 codes."""
        layout = self._problem.layout
        storage, dtype = self._storage, DTYPES[self._problem.dtype]
        elements = storage if self._is_fp8 else storage.view(dtype)
        size = elements.element_size()
        return elements.as_strided(
            (layout.num_blocks, layout.block_size, layout.dims.cached_dim),
            (layout.block_stride // size, layout.token_stride // size, 1),
        )

    def _numbers(self) -> torch.Tensor:
        """Return the view that kernels receive, in which e4m3 elements have their torch type."""
        return self._cache().view(torch.float8_e4m3fn) if self._is_fp8 else self._cache()

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return to_torch(array, self._device)
