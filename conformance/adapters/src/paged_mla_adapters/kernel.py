"""What the adapters share: a backend made of a kernel that only reads the cache.

Planning and writing are the reference's, so that the suite can also ask the groups that write
before they read; what such a run judges is the kernel's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_adapters.arrays import DTYPES, to_numpy, to_torch
from paged_mla_adapters.declared import mode
from paged_mla_adapters.surroundings.calls import Room, surroundings
from paged_mla_reference.rules.fp8 import quantize
from paged_mla_reference.rules.positions import metadata
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Output, Problem


@dataclass(frozen=True)
class Call:
    """One launch: N rows and the T query tokens of all of them, N and T at least 1.

    Parameters
    ----------
    problem : Problem
    q : dtype [T, H, R + P]
    cache : dtype or float8_e4m3fn [num_blocks, block_size, R + P]
        A view; its first two strides may exceed what it carries. What e4m3 stands for is to be
        multiplied by ``problem.cache_scale``.
    cu_seqlens_q : int32 [N + 1]
        Where the tokens of each row begin; as far apart for each row unless the backend declares
        the feature "mixed".
    block_table : int32 [N, M]
    seq_lens : int32 [N]
        0 for rows that pad the step.
    room : callable
        What :meth:`buffer` gets memory from.
    """

    problem: Problem
    q: torch.Tensor
    cache: torch.Tensor
    cu_seqlens_q: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    room: Room

    def buffer(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        *,
        fill: float = torch.nan,
    ) -> torch.Tensor:
        """Return a new tensor for an output or for scratch memory, with guard zones around it.

        Parameters
        ----------
        name : str
            What an error calls it, as "the output".
        shape : tuple of int
        dtype : torch.dtype
        fill : float
            What lies in it before the launch.
        """
        return self.room(name, shape, dtype).fill_(fill)


Kernel = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]  # out [T, H, R], lse [T, H]


@dataclass(frozen=True)
class KernelBackend:
    """See :class:`paged_mla_shared.backend.Backend`."""

    name: str
    version: str
    kernel: Kernel
    capabilities: Capabilities

    @property
    def mode(self) -> str:
        """What the kernel runs on."""
        return mode()

    @property
    def device(self) -> str:
        """Name of the device."""
        return torch.cuda.get_device_name() if self.mode == "gpu" else "Triton interpreter (CPU)"

    @property
    def memory_bytes(self) -> int:
        """Bytes free for one cache, once what earlier calls left is given back."""
        if self.mode == "gpu":
            torch.cuda.empty_cache()
            return int(torch.cuda.mem_get_info()[0])
        return 1 << 30

    def prepare(self, problem: Problem) -> KernelRunner:
        """Build a runner; raises ``Unsupported``."""
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        mixed = "mixed" in self.capabilities.features
        device = "cuda" if self.mode == "gpu" else "cpu"
        return KernelRunner(problem, self.kernel, device, mixed=mixed)


class KernelRunner:
    """See :class:`paged_mla_shared.backend.Runner`."""

    def __init__(self, problem: Problem, kernel: Kernel, device: str, *, mixed: bool) -> None:
        self._problem = problem
        self._kernel = kernel
        self._device = device
        self._mixed = mixed
        self._surroundings = surroundings(device)
        self._storage = torch.zeros(0, dtype=torch.uint8, device=device)

    def load_cache(self, image: CacheImage) -> None:
        """Fill the cache with the image's poison, then its live blocks."""
        layout = image.layout
        self._storage = torch.empty(0, dtype=torch.uint8, device=self._device)  # no room for two
        storage = self._surroundings.cache(layout.storage_bytes)
        storage.view(-1, len(image.poison)).copy_(self._tensor(image.poison))
        blocks = storage.view(layout.num_blocks, -1)
        blocks[self._tensor(image.block_ids)] = self._tensor(image.blocks)
        self._storage = storage

    def read_cache(self, block_ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Return raw bytes uint8 [n, block_stride]."""
        blocks = self._storage.view(self._problem.layout.num_blocks, -1)
        return to_numpy(blocks[self._tensor(block_ids)])

    def plan(self, batch: Batch) -> Metadata:
        """Return the reference's positions and slots."""
        return metadata(self._problem, batch)

    def append(self, batch: Batch) -> None:
        """Store rows where the reference puts them."""
        layout, slots = self._problem.layout, batch.slot_mapping
        slots = self.plan(batch).slot_mapping if slots is None else slots
        written = slots >= 0
        rows = np.hstack([batch.ckv[written], batch.k_pe[written]])
        if self._is_fp8:
            rows = quantize(
                rows.astype(np.float32), np.array(self._problem.cache_scale, np.float32)
            )

        def launch(given: Mapping[str, torch.Tensor], _room: Room) -> None:
            at = given["slots"]
            self._cache()[at // layout.block_size, at % layout.block_size] = given["rows"]

        inputs = {"slots": self._tensor(slots[written]), "rows": self._tensor(rows)}
        self._surroundings.run("append", launch, inputs, by_torch=True)

    def attend(self, batch: Batch) -> Output:
        """Launch the kernel on the rows of the batch, then on rows of padded tokens."""
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
        cache = self._cache()
        cache = cache.view(torch.float8_e4m3fn) if self._is_fp8 else cache

        def launch(
            given: Mapping[str, torch.Tensor], room: Room
        ) -> tuple[torch.Tensor, torch.Tensor]:
            call = Call(problem=self._problem, cache=cache, room=room, **given)
            with np.errstate(all="ignore"):  # the interpreter would warn of lanes that kernels mask
                return self._kernel(call)

        inputs = {
            "q": self._tensor(q),
            "cu_seqlens_q": self._tensor(np.pad(lens.cumsum(), (1, 0)).astype(np.int32)),
            "block_table": self._tensor(np.pad(batch.block_table[rows], ((0, padded), (0, 0)))),
            "seq_lens": self._tensor(np.pad(batch.seq_lens[rows], (0, padded))),
        }
        out, lse = self._surroundings.run("attend", launch, inputs)
        return Output(to_numpy(out[:tokens]), to_numpy(lse[:tokens]))

    def _rows(self, batch: Batch) -> tuple[NDArray[np.bool_], int]:
        """Return which rows the kernel gets, and the query length of a row of padded tokens."""
        if self._mixed:
            return np.ones(batch.num_rows, bool), 1
        asking = batch.query_lens > 0
        lengths = set(batch.query_lens[asking].tolist()) or {1}
        if len(lengths) > 1:
            raise Unsupported(f"rows of different query lengths: {sorted(lengths)}")
        return asking, lengths.pop()

    @property
    def _is_fp8(self) -> bool:
        return self._problem.cache_format == "fp8_e4m3"

    def _cache(self) -> torch.Tensor:
        """Return [num_blocks, block_size, R + P], of e4m3 the codes."""
        layout = self._problem.layout
        storage, dtype = self._storage, DTYPES[self._problem.dtype]
        elements = storage if self._is_fp8 else storage.view(dtype)
        size = elements.element_size()
        return elements.as_strided(
            (layout.num_blocks, layout.block_size, layout.dims.cached_dim),
            (layout.block_stride // size, layout.token_stride // size, 1),
        )

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return to_torch(array, self._device)
