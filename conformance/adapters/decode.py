"""What the adapters share: a decode kernel, NumPy on one side of it and torch on the other.

A decode kernel only reads the cache. Planning and writing are therefore the reference's, so that
the suite can also ask the groups that write before they read; what such a run judges is the
kernel's attention.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paged_mla_reference.positions import metadata
from paged_mla_shared.backend import Capabilities
from paged_mla_shared.dtypes import bits, dtype_name, numpy_dtype
from paged_mla_shared.errors import Unsupported
from paged_mla_shared.formats import PLAIN_FORMAT_OF_DTYPE
from paged_mla_shared.layout import CacheImage
from paged_mla_shared.problem import Batch, Metadata, Output, Problem

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
FEATURES = frozenset({"padding", "replay", "strided_cache", "large_offsets", "explicit_slots"})


@dataclass(frozen=True)
class Call:
    """One launch: N rows of q query tokens each, N and q at least 1.

    Parameters
    ----------
    problem : Problem
    q : dtype [N, q, H, R + P]
    cache : dtype [num_blocks, block_size, R + P]
        A view; its first two strides may exceed what it carries.
    block_table : int32 [N, M]
    seq_lens : int32 [N]
        0 for rows that pad the step; their table entries are 0.
    """

    problem: Problem
    q: torch.Tensor
    cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


Kernel = Callable[[Call], tuple[torch.Tensor, torch.Tensor]]  # out [N, q, H, R], lse [N, q, H]


@dataclass(frozen=True)
class DecodeBackend:
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
        """Bytes free for one cache."""
        return int(torch.cuda.mem_get_info()[0]) if self.mode == "gpu" else 1 << 30

    def prepare(self, problem: Problem) -> DecodeRunner:
        """Build a runner; raises ``Unsupported``."""
        if unmet := self.capabilities.unmet(problem, (), ()):
            raise Unsupported("; ".join(unmet))
        return DecodeRunner(problem, self.kernel, "cuda" if self.mode == "gpu" else "cpu")


class DecodeRunner:
    """See :class:`paged_mla_shared.backend.Runner`."""

    def __init__(self, problem: Problem, kernel: Kernel, device: str) -> None:
        self._problem = problem
        self._kernel = kernel
        self._device = device
        self._storage = torch.zeros(0, dtype=torch.uint8, device=device)

    def load_cache(self, image: CacheImage) -> None:
        """Fill the cache with the image's poison, then its live blocks."""
        layout = image.layout
        self._storage = torch.empty(0, dtype=torch.uint8, device=self._device)  # no room for two
        storage = torch.empty(layout.storage_bytes, dtype=torch.uint8, device=self._device)
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
        rows = self._tensor(np.hstack([batch.ckv[written], batch.k_pe[written]]))
        at = self._tensor(slots[written])
        self._cache()[at // layout.block_size, at % layout.block_size] = rows

    def attend(self, batch: Batch) -> Output:
        """Launch the kernel on the rows that ask something, then on rows of padded tokens."""
        dims, tokens = self._problem.dims, batch.num_tokens
        asking = batch.query_lens > 0
        lengths = set(batch.query_lens[asking].tolist()) or {1}
        if len(lengths) > 1:
            raise Unsupported(f"rows of different query lengths: {sorted(lengths)}")
        if tokens == 0:
            shape = (0, dims.num_heads, dims.kv_lora_rank)
            return Output(np.zeros(shape, batch.q_nope.dtype), np.zeros(shape[:2], np.float32))
        [query_len] = lengths
        padded = -(-tokens // query_len) - int(asking.sum())
        q = np.concatenate([batch.q_nope, batch.q_pe], axis=-1)
        q = np.concatenate([q, np.zeros((-tokens % query_len, *q.shape[1:]), q.dtype)])
        call = Call(
            problem=self._problem,
            q=self._tensor(q.reshape(-1, query_len, dims.num_heads, dims.cached_dim)),
            cache=self._cache(),
            block_table=self._tensor(np.pad(batch.block_table[asking], ((0, padded), (0, 0)))),
            seq_lens=self._tensor(np.pad(batch.seq_lens[asking], (0, padded))),
        )
        with np.errstate(all="ignore"):  # the interpreter would warn of lanes that kernels mask
            out, lse = self._kernel(call)
        return Output(to_numpy(out.flatten(0, 1)[:tokens]), to_numpy(lse.flatten(0, 1)[:tokens]))

    def _cache(self) -> torch.Tensor:
        layout = self._problem.layout
        elements = self._storage.view(DTYPES[self._problem.dtype])
        size = elements.element_size()
        return elements.as_strided(
            (layout.num_blocks, layout.block_size, layout.dims.cached_dim),
            (layout.block_stride // size, layout.token_stride // size, 1),
        )

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        dense = np.array(array, order="C", copy=True)
        if dtype_name(dense.dtype) == "bfloat16":
            return torch.from_numpy(bits(dense)).view(torch.bfloat16).to(self._device)
        return torch.from_numpy(dense).to(self._device)


def mode() -> str:
    """Return "interpreter" where ``TRITON_INTERPRET=1`` asks for it, else "gpu".

    Raises
    ------
    Unsupported
        Neither a GPU nor ``TRITON_INTERPRET=1`` is there.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "interpreter"
    if torch.cuda.is_available():
        return "gpu"
    raise Unsupported("no CUDA device")


def triton_dtypes() -> frozenset[str]:
    """Return what Triton kernels compute as the rules say: no bfloat16 in the interpreter."""
    names = {"bfloat16", "float16"} if mode() == "gpu" else {"float32"}
    return frozenset(names)


def capabilities(
    dtypes: frozenset[str],
    *,
    block_sizes: Iterable[int] = range(1, 257),
    head_dims: Iterable[tuple[int, int]],
    masks: Iterable[str] = ("causal",),
    features: frozenset[str] = FEATURES,
    max_query_len: int = 1,
) -> Capabilities:
    """Return what a decode kernel of these types serves; it reads a cache of its own type."""
    return Capabilities(
        ops=frozenset({"plan", "append", "attend"}),
        dtypes=dtypes,
        cache_formats=frozenset(PLAIN_FORMAT_OF_DTYPE[name] for name in dtypes),
        block_sizes=frozenset(block_sizes),
        num_heads=frozenset(range(1, 129)),
        head_dims=frozenset(head_dims),
        masks=frozenset(masks),
        features=features,
        max_query_len=max_query_len,
    )


def version_of(distribution: str, file: Path) -> str:
    """Return the installed version, or of a bare file what identifies it."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()[:12]}"


def to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a new array with the bits of `tensor`."""
    dense = tensor.detach().cpu().contiguous()
    if dense.dtype is torch.bfloat16:
        return dense.view(torch.uint16).numpy().view(numpy_dtype("bfloat16"))
    return dense.numpy().copy()
